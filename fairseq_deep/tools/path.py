"""print the directory of the installed package, for --user-dir "$(fairseq-deep path)"

fairseq compares the directory with the package's ``__path__`` as strings, so exactly this string must be printed.
"""

import argparse
import os

import fairseq_deep

EXAMPLE = "fairseq-deep path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the absolute path of the package's directory."""
    print(os.path.abspath(fairseq_deep.__path__[0]))
    return 0
