"""train systems under equal conditions and put them side by side"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.commands import run_driver
from fairseq_deep.recipes.compare.options import Compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which the driver parses itself."""
    Compare().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; return the exit status."""
    return run_driver("compare", args.words)
