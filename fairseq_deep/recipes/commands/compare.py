"""train systems under equal conditions and put them side by side"""

from __future__ import annotations

import argparse

from fairseq_deep.recipes.commands import run_driver

RAW = True


def run(args: argparse.Namespace) -> int:
    """Run it; return the exit status."""
    return run_driver("compare", args.words)
