"""Whether the statements of a claim hold: by the figures of each seed, and by tests of significance."""

import math
import os
import statistics

from results import bootstrap

LEARNED = 0.1
"""Nats a word by which the true source must beat another's before a model counts as one that translates."""
LEVEL = 0.05
LEAST_BLEU = 1.0
"""Below it a model does not translate, and a difference between two such models says nothing."""


def systems(claim, found, folder):
    """One record for each system that was trained: its place in the claim, and compare's figures of it."""
    rows = {row["system"]: row for row in found.get("systems", [])}
    records = []
    for system in claim.systems:
        row = rows.get(system.label, {"done": [], "seeds": {}, "failed": {}, "wanted": []})
        folders = {seed: os.path.join(folder, "runs", system.label, f"seed{seed}") for seed in row["done"]}
        place = {"label": system.label, "paper": system.paper, "depth": system.depth, "line": system.line}
        seeds = {int(seed): figures for seed, figures in row["seeds"].items()}
        records.append({**row, **place, "system": system.label, "seeds": seeds, "folders": folders})
    return records


def judge(statement, records, timed, fitted, resamples):
    """What was found of *statement*.

    Returns:
        "text": the statement; "found": the figures; "verdict": yes, not clear, no or open; "why": for the last three
    """
    named = {record["label"]: record for record in records}
    left, right = named[statement.left], named.get(statement.right)
    kinds = {"higher": _higher, "as good": _as_good, "trains": _trains, "fails": _fails}
    if statement.kind == "faster":
        found = _faster(timed.get(statement.left), timed.get(statement.right))
    elif statement.kind == "fits":
        found = _fits(fitted.get(statement.left), fitted.get(statement.right), statement.measure)
    else:
        found = kinds[statement.kind](left, right, resamples)
    words = {"higher": "is better than", "as good": "is no worse than", "faster": "decodes faster than",
             "trains": "learns to translate", "fails": "does not learn to translate",
             "fits": "is better than"}[statement.kind]  # fmt: skip
    text = f"{statement.left} {words} {statement.right}".strip()
    if statement.measure:
        text += f" in {statement.measure.replace('_', ' ')}"
    return {"text": text + (f" ({statement.text})" if statement.text else ""), **found}


def differences(left, right, seeds, resamples):
    """By seed, *left* less *right* in BLEU (or in loss, turned round), and the p of a paired bootstrap (BLEU alone)."""
    scored = all("bleu" in record["seeds"][seed] for record in (left, right) for seed in seeds)
    if not scored:
        return "loss", {s: right["seeds"][s]["valid_loss"] - left["seeds"][s]["valid_loss"] for s in seeds}, {}
    rows = [{"system": r["label"], "done": seeds, "seeds": {s: {} for s in seeds}, "folders": r["folders"]}
            for r in (right, left)]  # fmt: skip
    bootstrap(rows, resamples)
    chances = {seed: rows[1]["seeds"][seed]["p"] for seed in seeds}
    return "BLEU", {seed: left["seeds"][seed]["bleu"] - right["seeds"][seed]["bleu"] for seed in seeds}, chances


def _compared(left, right, resamples):
    seeds = [seed for seed in left["done"] if seed in right["done"]]
    if not seeds:
        return None, [], False
    if max(record["seeds"][seed].get("bleu", math.inf) for record in (left, right) for seed in seeds) < LEAST_BLEU:
        return f"BLEU below {LEAST_BLEU:g}", [], False
    measure, found, chances = differences(left, right, seeds, resamples)
    values = list(found.values())
    over_seeds = p_over_seeds(values)
    text = f"{statistics.fmean(values):+.2f} {measure}"
    if len(values) > 1:
        text += f" [{min(values):+.2f}, {max(values):+.2f}]"
    if chances:
        text += ", p " + " ".join(f"{chances[seed]:.3f}" for seed in found)
    if over_seeds is not None:
        text += f", over seeds {over_seeds:.3f}"
    sure = bool(chances) and max(chances.values()) < LEVEL or (over_seeds is not None and over_seeds < LEVEL)
    return text, values, sure


def _higher(left, right, resamples):
    text, values, sure = _compared(left, right, resamples)
    if not values:
        return {"found": text, "verdict": "not clear", "why": "neither translates"} if text else _open(left, right)
    if all(value > 0 for value in values) and sure:
        return {"found": text, "verdict": "yes"}
    if all(value < 0 for value in values) and sure:
        return {"found": text, "verdict": "no", "why": "the other way round, significantly"}
    return {"found": text, "verdict": "not clear", "why": "not significant"}


def _as_good(left, right, resamples):
    text, values, sure = _compared(left, right, resamples)
    if not values:
        return {"found": text, "verdict": "not clear", "why": "neither translates"} if text else _open(left, right)
    if all(value < 0 for value in values) and sure:
        return {"found": text, "verdict": "no", "why": "significantly worse"}
    return {"found": text, "verdict": "yes"}


def _gains(record):
    gains = [record["seeds"][seed].get("source_gain") for seed in record["done"]]
    return [] if None in gains else gains


def _trains(record, _, __):
    gains = _gains(record)
    text = f"source gain {', '.join(f'{gain:.2f}' for gain in gains)}"
    if not gains:
        return _open(record)
    if min(gains) > LEARNED:
        return {"found": text, "verdict": "yes"}
    return {"found": text, "verdict": "no" if max(gains) <= LEARNED else "not clear", "why": "it ignores its source"}


def _fails(record, _, __):
    gains = _gains(record)
    text = f"source gain {', '.join(f'{gain:.2f}' for gain in gains)}"
    if record["failed"] and not gains:
        return {"found": "; ".join(record["failed"].values()), "verdict": "yes"}
    if not gains:
        return _open(record)
    if max(gains) <= LEARNED:
        return {"found": text, "verdict": "yes"}
    return {"found": text, "verdict": "no" if min(gains) > LEARNED else "not clear", "why": "it uses its source"}


def _faster(left, right):
    if not left or not right:
        return {"found": "-", "verdict": "open", "why": "not measured"}
    ratio = left["tokens_per_second"] / right["tokens_per_second"]
    text = f"{ratio:.2f} times the tokens a second"
    if min(left["rounds"]) > max(right["rounds"]):
        return {"found": text, "verdict": "yes"}
    if max(left["rounds"]) < min(right["rounds"]):
        return {"found": text, "verdict": "no", "why": "slower in every round"}
    return {"found": text, "verdict": "not clear", "why": "the rounds overlap"}


def _fits(left, right, measure):
    """One seed and no test of significance: which of the two it is."""
    if not left or not right:
        return {"found": "-", "verdict": "open", "why": "not measured"}
    text = f"{left[measure]:.2f} and {right[measure]:.2f}"
    better = left[measure] < right[measure] if measure.endswith("ppl") else left[measure] > right[measure]
    return {"found": text, "verdict": "yes (one seed)" if better else "no"}


def _open(*records):
    missing = [record["label"] for record in records if not record["done"]]
    why = f"not trained: {', '.join(missing)}" if missing else "not measured with the same seeds"
    return {"found": "-", "verdict": "open", "why": why}


def p_over_seeds(values):
    """Two-sided p of Student's t that paired differences have a mean of 0; None for fewer than three."""
    n = len(values)
    if n < 3:
        return None
    deviation = statistics.stdev(values)
    if deviation == 0:
        return 0.0 if values[0] else 1.0
    t = abs(statistics.fmean(values)) / (deviation / math.sqrt(n))
    freedom = n - 1
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    steps = 2000  # the density from 0 to t, by Simpson's rule
    width = t / steps
    heights = [(1 + (k * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for k in range(steps + 1)]
    inside = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    return max(0.0, 1 - 2 * scale * inside)
