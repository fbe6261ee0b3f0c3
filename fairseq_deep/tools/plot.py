"""draw the aggregation weights of a checkpoint (weights), or the curves of training runs (run)"""

import argparse

from fairseq_deep.tools import curves, weights

PICTURES = {"weights": weights, "run": curves}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each kind of picture."""
    kinds = parser.add_subparsers(dest="what", metavar="{weights,run}", required=True)
    for name, module in PICTURES.items():
        summary = module.__doc__.strip().splitlines()[0]
        kind = kinds.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    """Draw the picture."""
    return PICTURES[args.what].run(args)
