"""train the systems of a paper's claim and judge its statements"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.claims.driver import Claims
from fairseq_deep.recipes.commands import run_driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; the driver parses them."""
    Claims().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the driver and return its exit status."""
    return run_driver("claims", args.words)
