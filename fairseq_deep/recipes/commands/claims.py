"""train the systems of a paper's claim and judge its statements"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.commands import add_words, run_driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command."""
    add_words(parser, "options and claims")


def run(args: argparse.Namespace) -> int:
    """Run it; return the exit status."""
    return run_driver("claims", args.words)
