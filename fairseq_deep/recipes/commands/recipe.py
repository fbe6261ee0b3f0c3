"""run a recipe, from text to BLEU in resumable stages"""

from __future__ import annotations

import argparse
import glob
import os

from fairseq_deep.recipes.commands import add_words, run_driver
from fairseq_deep.recipes.options import EXAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command."""
    parser.add_argument("task", choices=tasks(), metavar="TASK", help=f"one of {', '.join(tasks())}")
    add_words(parser, "options of the recipe")


def tasks() -> list[str]:
    """The recipes: folders of ``examples/``."""
    found = glob.glob(os.path.join(glob.escape(EXAMPLES), "*", "recipe.args"))
    return sorted(os.path.basename(os.path.dirname(path)) for path in found)


def run(args: argparse.Namespace) -> int:
    """Run the recipe; return its exit status."""
    return run_driver(f"recipe/{args.task}", args.words)
