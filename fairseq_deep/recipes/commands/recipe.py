"""run a recipe, from text to BLEU in resumable stages"""

from __future__ import annotations

import argparse
import glob
import os

from fairseq_deep.core.registry import nearest
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver
from fairseq_deep.recipes.commands import check_clone, run_driver
from fairseq_deep.recipes.options import EXAMPLES
from fairseq_deep.recipes.recipe import Recipe

EXAMPLE = "fairseq-deep recipe wmt16_ende --demo"


def tasks() -> list[str]:
    """Return the names of the recipes, directories of ``examples/``; ``compare`` is a command of its own."""
    found = glob.glob(os.path.join(glob.escape(EXAMPLES), "*", "recipe.args"))
    return sorted({os.path.basename(os.path.dirname(path)) for path in found} - {"compare"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipes and their options, for tab completion."""
    parser.add_argument("task", choices=tasks(), help="recipe")
    Recipe().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the recipe named by the first word, and return its exit status."""
    check_clone()
    known = tasks()
    if not args.words or args.words[0] in ("-h", "--help"):
        print(f"usage: fairseq-deep recipe TASK [options] [-- flags for fairseq-train]\n\nTASK: {', '.join(known)}\n"
              f"fairseq-deep recipe TASK --help: its options\n\nexample:\n  {EXAMPLE}")  # fmt: skip
        return 0
    task, *words = args.words
    if task not in known:
        raise UsageError(f"unknown recipe {task}{nearest(task, known)} (known: {', '.join(known)})")
    return run_driver(driver.main, task, words)
