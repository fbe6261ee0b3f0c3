"""Results of a comparison: values per seed, statistics over seeds, and the paired bootstrap."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from fairseq_deep.plugin.bleu import bleu_for
from fairseq_deep.recipes.changes import read_command
from fairseq_deep.recipes.record import median, result_line
from fairseq_deep.tools import results
from fairseq_deep.tools.command_lines import flags_of
from fairseq_deep.tools.results import spread
from fairseq_deep.tools.significance import paired_bootstrap, read_run

if TYPE_CHECKING:
    from .systems import System
    from .trainings import Run

Row = dict[str, Any]
Curves = dict[int, dict[int, float]]
"""Loss by seed and update."""

FIGURES = (*results.FIGURES, "equal_time", "difference")  # these have a mean and a spread over the seeds
FACTS = ("tokens_per_update", "updates", "precision", "devices", "hardware", "commit", "date")
KEPT = (*results.FIGURES, *FACTS, "parameters", "signature")


DIVERGED = re.compile(r"\bnan\b|\binf(inite)?\b|diverged in update|loss scale|not finite|no number", re.IGNORECASE)
PATH = re.compile(r"\S*/\S*/\S*")  # a directory may be called nan


def diverged(reason: str) -> bool:
    """Return whether a run failed because of its method or settings, as opposed to the machine."""
    return bool(DIVERGED.search(PATH.sub("", reason)))


def rows(systems: list[System], runs: list[Run], resamples: int, folder: str = "") -> list[Row]:
    """Return one record per system; the first system is the baseline.

    Args:
        folder: directory of the comparison; a line per finished run is added to its ``results.jsonl``

    Returns:
        for each system "done" and "failed" (its seeds), "seeds" (values by seed), "curve" (loss by seed and update),
        and for each of ``FIGURES`` mean, minimum, maximum and standard deviation
    """
    done = [run for run in runs if run.is_done()]
    lines = {run.folder: result_line(run.folder, run.system.label, run.system.text, run.seed) for run in done}
    if folder and lines:
        results.add(folder, [{**line, "folder": os.path.relpath(place, folder)} for place, line in lines.items()])
    found = [_row(system, [run for run in runs if run.system is system], lines) for system in systems]
    first = found[0]
    for row in found[1:]:
        for seed in [seed for seed in row["done"] if seed in first["done"] and "bleu" in first["seeds"][seed]]:
            difference = row["seeds"][seed]["bleu"] - first["seeds"][seed]["bleu"]
            row["seeds"][seed].update(difference=round(difference, 2))
    if resamples and any("bleu" in figures for row in found for figures in row["seeds"].values()):
        bootstrap(found, resamples)
    steps = {row["system"]: median([row["seeds"][seed]["step_seconds"] for seed in row["done"]]) for row in found}
    losses = equal_time({row["system"]: row["curve"] for row in found}, steps)
    for row in found:
        for seed in row["done"]:
            row["seeds"][seed]["equal_time"] = losses.get(row["system"], {}).get(seed)
        for figure in FIGURES:
            row[figure] = spread([row["seeds"][seed].get(figure) for seed in row["done"]])
    return found


def _row(system: System, runs: list[Run], lines: dict[str, dict[str, Any]]) -> Row:
    row: Row = {"system": system.label, "command": system.text, "parameters": None, "done": [], "failed": {}}
    row.update(seeds={}, line=system.line, depth=system.depth)
    row["tuned"] = {f"{rate:g}": loss for rate, loss in system.tuned.items()}
    row.update(wanted=[run.seed for run in runs], curve={}, folders={})
    for run in runs:
        if run.folder in lines:
            line = lines[run.folder]
            row["done"].append(run.seed)
            row["seeds"][run.seed] = {name: line[name] for name in KEPT if name in line}
            row["curve"][run.seed] = {int(update): loss for update, loss in line["curve"].items()}
            row["parameters"] = row["parameters"] or line["parameters"]
            row["folders"][run.seed] = run.folder
        elif run.reason():
            row["failed"][run.seed] = run.reason()
    return row


def equal_time(curves: dict[str, Curves], steps: dict[str, float | None]) -> dict[str, dict[int, float | None]]:
    """Return the losses at the time when the fastest system finished.

    Args:
        curves: loss by system, seed and update
        steps: seconds per update by system; systems without a value are omitted

    Returns:
        losses by system and seed; None before the first validation
    """
    timed = {system: seeds for system, seeds in curves.items() if steps.get(system)}
    end = min((steps[system] * max(curve) for system, seeds in timed.items() for curve in seeds.values()), default=0)
    return {
        system: {seed: loss_at(curve, end / steps[system]) for seed, curve in seeds.items()}
        for system, seeds in timed.items()
    }


def loss_at(curve: dict[int, float], updates: float) -> float | None:
    """Return the loss after *updates* updates, by linear interpolation; None before the first validation."""
    before = [update for update in curve if update <= updates]
    after = [update for update in curve if update >= updates]
    if not before or not after:
        return curve[max(curve)] if before else None
    low, high = max(before), min(after)
    share = (updates - low) / (high - low) if high > low else 0.0
    return curve[low] + share * (curve[high] - curve[low])


def bootstrap(found: list[Row], resamples: int) -> None:
    """Run a paired bootstrap between the first system and each other, per seed, and add "p" to the values.

    Two systems below a BLEU of 1 have no p: their translations are chance.
    """
    first = found[0]
    for seed in first["done"]:
        least = 0 if first["seeds"][seed].get("bleu", 1) >= 1 else 1
        others = [row for row in found[1:] if seed in row["done"] and row["seeds"][seed].get("bleu", 1) >= least]
        if not others:
            continue
        _, references = read_run(first["folders"][seed])
        named = [(row["system"], read_run(row["folders"][seed])[0]) for row in (first, *others)]
        bleu = bleu_for(_target_of(first["folders"][seed]), force=True)
        measured = paired_bootstrap(named, references, {"BLEU": bleu}, resamples)["BLEU"]
        for row, result in zip(others, measured.results[1:]):
            row["seeds"][seed].update(p=result.p_value)
        first["seeds"][seed].update(bootstrap=measured.signature)


def _target_of(folder: str) -> str:
    """Return the target language of a finished run."""
    return flags_of(read_command(os.path.join(folder, "train.sh"))).get("--target-lang", "")


def facts(found: list[Row]) -> dict[str, str]:
    """Return common properties of all runs; if runs differ, a property has all values."""
    figures = [row["seeds"][seed] for row in found for seed in row["done"]]
    shared = {}
    for name in (*FACTS, "signature", "bootstrap"):
        values = dict.fromkeys(str(entry[name]) for entry in figures if entry.get(name) is not None)
        shared[name] = "; ".join(values)
    return shared
