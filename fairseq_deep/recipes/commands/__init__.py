"""The sub-commands of ``fairseq-deep`` for experiments.

``recipe`` and ``compare`` pass their words, ``args.words``, to a driver. The scripts in ``examples`` call them in the
environment of the repository; otherwise they use the current one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.options import EXAMPLES, ROOT


def check_clone() -> None:
    """Raise `UsageError` outside of a clone of the repository."""
    if not os.path.isdir(EXAMPLES):
        raise UsageError(f"no recipes in {EXAMPLES}; run this in a clone of the repository")


def run_driver(main: Callable[[str, str, list[str]], int], task: str, words: list[str]) -> int:
    """Call *main* with the recipe *task*, its script and *words*, and return its exit status."""
    check_clone()
    os.environ.setdefault("FAIRSEQ_DEEP_ENV", "current")  # the scripts that it writes must use this environment
    os.environ["PYTHONUTF8"] = "1"  # programs print text; start.sh does the same
    for stream in (sys.stdout, sys.stderr):
        if stream.encoding.lower() != "utf-8":
            stream.reconfigure(encoding="utf-8")
    script = "run_wmt16_ende.sh" if task == "wmt16_ende" else f"examples/{task}/run.sh"
    return main(task, os.path.join(ROOT, script), words)
