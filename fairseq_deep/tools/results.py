"""``results.jsonl``: one line per finished training run, with settings, conditions and results.

Recipes and comparisons write this file to their directory. Tables, pictures, ``fairseq-deep report`` and the docs read
their numbers from it.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable
from typing import Any

from filelock import FileLock

from fairseq_deep.runtime.records import FACTS, SEARCH, Check, amount, figure, line, needed, optional, read_json_lines
from fairseq_deep.tools.output_files import write_text

FILE, LOCK = "results.jsonl", ".results.lock"
FIGURES = ("valid_loss", "valid_nll", "valid_ppl", "bleu", "chrf", "source_gain", "step_seconds", "tokens_per_second",
           "sentences_per_second", "ratio_encoder", "ratio_decoder", "between_encoder", "between_decoder",
           "train_hours")  # fmt: skip
"""Measured values; a mean over seeds is meaningful for all of them."""
LOSSES = Check("an object with a number for each update",
               lambda value: isinstance(value, dict) and all(map(figure, value.values()))
               and all(key.isascii() and key.isdigit() for key in value))  # fmt: skip
SCHEMA = {
    **SEARCH, **FACTS, **{name: optional(figure) for name in FIGURES},
    "system": needed(line), "seed": needed(amount), "command": line, "folder": line, "parameters": optional(amount),
    "updates": amount, "signature": line, "flags": {"*": line}, "environment": {"*": line}, "curve": LOSSES,
    "parts": {"*": {"*": figure}},
}  # fmt: skip
"""A line of the file.

Losses are in bits per token. ``curve`` has the validation loss by update, ``flags`` the fairseq-train flags that change
the result. ``folder`` is relative to the directory of the file. ``parts`` has BLEU and chrF of parts of the test set.
"""


def read(folder: str) -> list[dict[str, Any]]:
    """Return the runs of an experiment; no runs if it has no ``results.jsonl``.

    Args:
        folder: the directory of the experiment, or the file itself

    Raises:
        UsageError: the file cannot be read, or a line is not a run
    """
    return list(read_json_lines(os.path.join(folder, FILE) if os.path.isdir(folder) else folder, SCHEMA))


def add(folder: str, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write *runs* to the experiment's ``results.jsonl``, and return all of its runs.

    A run replaces the earlier run with the same system and seed; other runs are not changed. Writing is atomic, and
    processes take turns.
    """
    with FileLock(os.path.join(folder, LOCK)):
        found = {(run["system"], run["seed"]): run for run in [*read(folder), *runs]}
        lines = [json.dumps(run, ensure_ascii=False) + "\n" for run in found.values()]
        write_text(os.path.join(folder, FILE), "".join(lines))
    return list(found.values())


def by_system(runs: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Group runs: ``{system: {seed: run}}``, in the order of the file."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["system"], {})[run["seed"]] = run
    return found


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Compute mean, standard deviation (None for one value), minimum and maximum of the values that are not None.

    Returns:
        None without any value; NaN for statistics that are not defined because a value is not finite
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    ends = (min(known), max(known)) if not any(map(math.isnan, known)) else (math.nan, math.nan)
    deviation = None
    if len(known) > 1:
        deviation = statistics.stdev(known) if all(map(math.isfinite, known)) else math.nan
    mean = statistics.fmean(known)
    if math.isfinite(mean):
        mean = min(max(mean, ends[0]), ends[1])  # rounding can move the mean of equal values
    return {"mean": mean, "std": deviation, "min": ends[0], "max": ends[1]}


def over_seeds(differences: list[float], margin: float = 0.0) -> dict[str, float]:
    """Test paired differences, one per seed, by Student's t.

    Returns:
        "half" (half of the 95 % confidence interval of the mean), "p" (two-sided, for a mean of 0), "p_equal" (the
        larger p of two one-sided tests for a mean between -*margin* and *margin*) and "margin"; empty for fewer than
        three differences, or if one is not a finite number
    """
    if len(differences) < 3 or not all(map(math.isfinite, differences)):
        return {}
    from scipy import stats

    if len({*differences}) == 1:  # scipy's t is not a number
        mean = differences[0]
        return {"half": 0.0, "p": float(mean == 0), "p_equal": float(abs(mean) >= margin), "margin": margin}
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    sides = ((-margin, "greater"), (margin, "less"))
    equal = max(stats.ttest_1samp(differences, end, alternative=side).pvalue for end, side in sides)
    return {"half": float(high - low) / 2, "p": float(test.pvalue), "p_equal": float(equal), "margin": margin}


def holm(chances: list[float | None], count: int) -> list[float | None]:
    """Apply Holm's step-down correction: the k-th smallest of *count* tests is multiplied by count - k + 1.

    Tests without a p, and those that are not in *chances*, count as the largest.
    """
    known = sorted((p, index) for index, p in enumerate(chances) if p is not None)
    corrected, least = list(chances), 0.0
    for rank, (p, index) in enumerate(known):
        least = max(least, min(1.0, p * (count - rank)))
        corrected[index] = least
    return corrected
