"""train systems under equal conditions and put them side by side"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.commands import add_words, run_driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command."""
    add_words(parser, "options and systems")


def run(args: argparse.Namespace) -> int:
    """Run it; return the exit status."""
    return run_driver("compare", args.words)
