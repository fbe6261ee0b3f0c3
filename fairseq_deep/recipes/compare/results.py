"""Results of a comparison: values per seed, and statistics over seeds."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

import numpy

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import median, result_line
from fairseq_deep.tools import results, score
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.results import over_seeds, spread
from fairseq_deep.tools.significance import read_run

if TYPE_CHECKING:
    from .systems import System
    from .trainings import Run

Row = dict[str, Any]
Parts = dict[str, list[int]]
"""Indices of the sentences of each part of the test set."""

CHOOSING, REPORTING = "choosing", "reporting"
"""Halves of a test set: one to choose systems, one to report their scores."""
FIGURES = (*results.FIGURES, "equal_time", "difference")  # these have a mean and a spread over the seeds
FACTS = ("tokens_per_update", "updates", "precision", "devices", "hardware", "commit", "date")
KEPT = (*results.FIGURES, *FACTS, "parameters", "signature")


DIVERGED = re.compile(r"\bnan\b|\binf(inite)?\b|diverged in update|loss scale|not finite|no number", re.IGNORECASE)
PATH = re.compile(r"\S*/\S*/\S*")  # a directory may be called nan


def diverged(reason: str) -> bool:
    """Return whether a run failed because of its method or settings, as opposed to the machine."""
    return bool(DIVERGED.search(PATH.sub("", reason)))


def parts_of(sources: list[str], domains: list[str], halves: bool) -> Parts:
    """Return the parts of a test set: its *halves*, by a hash of the source, and its domains.

    Args:
        domains: the domain of each sentence; empty if there are none

    Returns:
        with *halves* "choosing" and "reporting"; for each domain its sentences, with *halves* of the reporting half
    """
    found: Parts = {}
    for index, source in enumerate(sources):
        half = (CHOOSING, REPORTING)[hashlib.sha256(source.encode()).digest()[0] % 2]
        for part in [half] * halves + domains[index : index + 1] * (half == REPORTING or not halves):
            found.setdefault(part, []).append(index)
    return found


def read_parts(runs: list[Run], domains: str, halves: bool) -> Parts:
    """Return the parts of the test set of *runs*; the file *domains* has the domain of each sentence, if it exists."""
    scored = [run for run in runs if run.is_done() and os.path.exists(os.path.join(run.folder, "score-test.json"))]
    tags = read_lines(domains) if os.path.exists(domains) else []
    if not scored or not (tags or halves):
        return {}
    sources = read_lines(os.path.join(scored[0].folder, "text", "raw", f"test.{scored[0].plan.options.source_lang}"))
    if tags and len(tags) != len(sources):
        raise UsageError(f"{domains} has {len(tags)} lines for {len(sources)} test sentences: give one domain per line")
    if odd := {"", CHOOSING, REPORTING} & {*tags}:
        raise UsageError(f"{domains}: '{min(odd)}' cannot name a domain: give it another name")
    found = parts_of(sources, tags, halves)
    if halves and not {CHOOSING, REPORTING} <= found.keys():
        raise UsageError(f"a half of the {len(sources)} test sentences is empty: omit --halves")
    return found


def score_parts(folder: str, parts: Parts, lang: str, lowercase: bool) -> dict[str, dict[str, float]]:
    """Return BLEU and chrF of each part of the test set for the run in *folder*, as its recipe computes them."""
    hypotheses, references = read_run(folder)
    found = {}
    for part, indices in parts.items():
        ours, *others = ([side[index] for index in indices] for side in (hypotheses, *references))
        scores = score.compute(ours, others, "sacrebleu", lowercase, lang)
        found[part] = {name: round(scores[name], 2) for name in ("bleu", "chrf")}
    return found


def rows(
    systems: list[System], runs: list[Run], folder: str = "", parts: Parts | None = None, margin: float = 0.5
) -> list[Row]:
    """Return one record per system; the first system is the baseline.

    Args:
        folder: directory of the comparison; a line per finished run is added to its ``results.jsonl``
        parts: parts of the test set; of two halves, BLEU, chrF and all tests are of the reporting one
        margin: BLEU scores that differ by less count as equal

    Returns:
        for each system "done" and "failed" (its seeds), "seeds" (values by seed), "curve" (loss by seed and update),
        "tests" (`over_seeds` of the differences), and for each of ``FIGURES`` and for BLEU and chrF of each part mean,
        minimum, maximum and standard deviation
    """
    done, parts = [run for run in runs if run.is_done()], parts or {}
    lines = {run.folder: result_line(run.folder, run.system.label, run.system.text, run.seed) for run in done}
    for run in done:
        line, options = lines[run.folder], run.plan.options
        if parts and "bleu" in line:
            line["parts"] = score_parts(run.folder, parts, options.target_lang, options.lowercase)
    if folder and lines:
        results.add(folder, [{**line, "folder": os.path.relpath(place, folder)} for place, line in lines.items()])
    found = [_row(system, [run for run in runs if run.system is system], lines) for system in systems]
    first = found[0]
    for row in found[1:]:
        for seed in [seed for seed in row["done"] if seed in first["done"] and "bleu" in first["seeds"][seed]]:
            difference = row["seeds"][seed]["bleu"] - first["seeds"][seed]["bleu"]
            row["seeds"][seed].update(difference=round(difference, 2))
    add_equal_time(found)
    for row in found:
        for figure in (*FIGURES, *(f"{name} {part}" for part in parts for name in ("bleu", "chrf"))):
            row[figure] = spread([row["seeds"][seed].get(figure) for seed in row["done"]])
        differences = [row["seeds"][seed].get("difference") for seed in row["done"]]
        row["tests"] = over_seeds([each for each in differences if each is not None], margin)
    return found


def _row(system: System, runs: list[Run], lines: dict[str, dict[str, Any]]) -> Row:
    row: Row = {"system": system.label, "command": system.text, "parameters": None, "done": [], "failed": {}}
    row.update(seeds={}, line=system.line, depth=system.depth)
    row["tuned"] = {f"{rate:g}": loss for rate, loss in system.tuned.items()}
    row.update(wanted=[run.seed for run in runs], curve={})
    for run in runs:
        if run.folder in lines:
            line = lines[run.folder]
            row["done"].append(run.seed)
            figures = {name: line[name] for name in KEPT if name in line}
            parts = line.get("parts", {})
            figures.update({f"{name} {part}": value for part, own in parts.items() for name, value in own.items()})
            row["seeds"][run.seed] = figures | parts.get(REPORTING, {})
            row["curve"][run.seed] = {int(update): loss for update, loss in line["curve"].items()}
            row["parameters"] = row["parameters"] or line["parameters"]
        elif run.reason():
            row["failed"][run.seed] = run.reason()
    return row


def add_equal_time(found: list[Row]) -> None:
    """Add "equal_time" to the values: the loss at the time when the fastest system finished, interpolated.

    It is omitted for a system without step times, and before the first validation.
    """
    steps = [median([row["seeds"][seed]["step_seconds"] for seed in row["done"]]) for row in found]
    ends = [step * max(curve) for row, step in zip(found, steps) if step for curve in row["curve"].values() if curve]
    for row, step in zip(found, steps):
        for seed, curve in row["curve"].items():
            known, end = sorted(curve), min(ends) / step if step else 0.0
            if known and end >= known[0]:
                loss = numpy.interp(end, known, [curve[update] for update in known])
                row["seeds"][seed]["equal_time"] = float(loss)


def facts(found: list[Row]) -> dict[str, str]:
    """Return common properties of all runs; if runs differ, a property has all values."""
    figures = [row["seeds"][seed] for row in found for seed in row["done"]]
    shared = {}
    for name in (*FACTS, "signature"):
        values = dict.fromkeys(str(entry[name]) for entry in figures if entry.get(name) is not None)
        shared[name] = "; ".join(values)
    return shared
