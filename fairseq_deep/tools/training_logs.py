"""Logs of training runs: the curves of fairseq-train's output, or of a recipe's ``train.jsonl``.

A log is the output of fairseq-train (with ``--log-format json`` or ``simple``), or the ``train.jsonl`` of a recipe.
"""

import os
import re
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import LOGGED, check, numeral, parse
from fairseq_deep.tools.input_text import read_lines

# panel: names in the log, in training (after each interval) and in validation
MEASURES = {
    "loss": ("loss", "valid_loss"),
    "perplexity": ("ppl", "valid_ppl"),
    "BLEU": (None, "valid_bleu"),
    "learning rate": ("lr", None),
    "gradient norm": ("gnorm", None),
}
PLACES = ("train.jsonl", "logs/4-train.log")  # in the directory of a recipe
ENTRY = re.compile(r"(?:^|\| )(train_inner|valid) \| (.*)$")
SIMPLE = re.compile(r"([a-z]\w*)[= ](-?[\d.]+(?:e[-+]?\d+)?|nan|-?inf)(?=[\s,]|$)")

Curve = dict[int, float]
Run = dict[str, Curve]


def find_log(folder: str) -> str | None:
    """Return the training log in the directory of a recipe; None if it does not exist or is empty."""
    paths = (os.path.join(folder, name) for name in PLACES)
    return next((path for path in paths if os.path.isfile(path) and os.path.getsize(path)), None)


def read_run(path: str, started: bool = False) -> Run:
    """Read the curves of the log at *path*, by their names in the log.

    If an update was repeated, as after a kill, the later entry counts.

    Args:
        started: accept a log that has no entries of training yet

    Raises:
        UsageError: the log cannot be read, or has no entries of training without *started*
    """
    curves: Run = {}
    for place, line in enumerate(read_lines(path), 1):
        entry = _entry(line)
        try:
            check(entry, LOGGED)
        except ValueError as error:
            raise UsageError(f"{path}:{place}: {error}; remove the line") from error
        update = entry.get("num_updates", entry.get("valid_num_updates"))
        for name, value in entry.items() if update is not None else ():
            if numeral(value):
                curves.setdefault(name, {})[int(float(update))] = float(value)
    if not started and not any(name in curves for names in MEASURES.values() for name in names):
        raise UsageError(f"{path} is not a training log: it must have a line with train_inner or valid")
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _entry(line: str) -> dict[str, Any]:
    """Return the measures in a line of a log; empty if there are none."""
    found = ENTRY.search(line)
    text = found[2] if found else line
    if text.startswith("{"):
        try:
            entry = parse(text)
        except ValueError:
            return {}
        return entry if found or entry.get("kind") in ("train_inner", "valid") else {}
    prefix = "valid_" if found and found[1] == "valid" else ""
    return {prefix + name: value for name, value in SIMPLE.findall(text)} if found else {}
