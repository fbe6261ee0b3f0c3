"""The sub-commands ``recipe`` and ``compare`` of ``fairseq-deep``, which run in the current environment.

They pass their words, ``args.words``, to the driver.
"""

from __future__ import annotations

import os
import sys

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.driver import main
from fairseq_deep.recipes.options import EXAMPLES, ROOT


def check_clone() -> None:
    """Raise `UsageError` outside of a clone of the repository."""
    if not os.path.isdir(EXAMPLES):
        raise UsageError(f"no recipes in {EXAMPLES}; run this in a clone of the repository")


def run_driver(kind: str, words: list[str]) -> int:
    """Run the driver, and return its exit status."""
    check_clone()
    os.environ.setdefault("FAIRSEQ_DEEP_ENV", "current")  # the scripts that it writes must use this environment
    os.environ["PYTHONUTF8"] = "1"  # programs print text; start.sh does the same
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    folder = kind.removeprefix("recipe/")
    script = os.path.join(EXAMPLES, folder, "run.sh")
    if kind == "recipe/wmt16_ende":
        script = os.path.join(ROOT, "run_wmt16_ende.sh")
    return main([kind, script, *words])
