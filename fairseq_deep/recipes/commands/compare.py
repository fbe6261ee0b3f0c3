"""train systems under equal conditions and compare them"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.commands import run_driver
from fairseq_deep.recipes.compare.options import Compare

EXAMPLE = "fairseq-deep compare --demo --seeds 3 prenorm_6l dlcl_6l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the systems and the options, for tab completion."""
    Compare().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the driver and return its exit status."""
    from fairseq_deep.recipes.compare.driver import main

    return run_driver(main, "compare", args.words)
