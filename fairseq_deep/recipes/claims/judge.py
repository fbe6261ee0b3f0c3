"""Verdicts on the statements of a claim, from results per seed and significance tests.

With three or more seeds, Student's t decides, since the variance between seeds exceeds the variance of a resampled test
set. With fewer seeds, the bootstrap decides. It applies only to the trained models, so the verdict states the number of
seeds.
"""

import math
import os
import statistics

from fairseq_deep.recipes.compare.results import bootstrap, diverged
from fairseq_deep.tools.results import p_over_seeds

LEARNED = 0.1
"""Minimum source gain of a model that uses its source, in nats per sub-word."""
RISE = 1.0
"""Maximum increase of the loss from its best value to the end of training, in bits; above it, training diverged."""
LEVEL = 0.05
"""Significance level."""
BOOTSTRAP_LEVEL = LEVEL / 2
"""Significance level of sacreBLEU's one-tailed p, which is below 0.05 in 11 % of cases without a difference."""
MARGIN = 0.5
"""Maximum difference in BLEU for "no worse"."""
LEAST_BLEU = 1.0
"""Minimum BLEU of a model that translates; differences between models below it are not meaningful."""


def systems(claim, found, folder):
    """Return a record per system, with its entry in the claim and compare's results."""
    rows = {row["system"]: row for row in found.get("systems", [])}
    records = []
    for system in claim.systems:
        row = rows.get(system.label, {"done": [], "seeds": {}, "failed": {}, "wanted": []})
        folders = {seed: os.path.join(folder, "runs", system.label, f"seed{seed}") for seed in row["done"]}
        place = {"label": system.label, "paper": system.paper, "depth": system.depth, "line": system.line}
        seeds, failed = ({int(seed): value for seed, value in row[name].items()} for name in ("seeds", "failed"))
        by_seed = {"seeds": seeds, "failed": failed, "folders": folders}
        records.append({**row, **place, "system": system.label, **by_seed})
    return records


def judge(statement, records, timed, fitted, resamples):
    """Judge *statement*.

    Returns:
        "text": the statement; "found": the results; "verdict": yes, not clear, no or open; "why": reason (not for yes)
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
             "trains": "learns to use its source", "fails": "does not learn to use its source",
             "fits": "is better than"}[statement.kind]  # fmt: skip
    text = f"{statement.left} {words} {statement.right}".strip()
    if statement.measure:
        text += f" in {statement.measure.replace('_', ' ')}"
    return {"text": text + (f" ({statement.text})" if statement.text else ""), **found}


def differences(left, right, seeds, resamples):
    """Return the measure, differences by seed (positive if *left* is better), and p of a paired bootstrap for BLEU."""
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
    text += _of_wanted(left, len(values))
    if chances:
        text += ", p " + " ".join(f"{chances[seed]:.3f}" for seed in found)
    if over_seeds is not None:
        text += f", over seeds {over_seeds:.3f}"
    if over_seeds is not None:
        return text, values, over_seeds < LEVEL
    return text, values, bool(chances) and max(chances.values()) < BOOTSTRAP_LEVEL


def _of_wanted(record, count):
    """Return a note if seeds are missing, because they failed or are not trained yet."""
    wanted = len(record.get("wanted") or ()) or count
    return f" ({count} of {wanted} seeds)" if count < wanted else ""


def _diverged(record):
    """Return {seed: reason} of the runs that diverged."""
    return {seed: reason for seed, reason in record["failed"].items() if diverged(reason)}


def _won(left, right):
    """Return signs of seeds with one diverged system (1: *right* diverged, -1: *left* diverged), and a description."""
    pairs = ((left, right, 1), (right, left, -1))
    found = {seed: sign for one, other, sign in pairs for seed in _diverged(other) if seed in one["done"]}
    words = [f"{(right if sign > 0 else left)['label']} diverged with seed {seed}" for seed, sign in found.items()]
    return list(found.values()), "; ".join(words)


def _said(verdict, count):
    """Add the number of seeds to a verdict from one or two seeds."""
    few = {1: " (one seed)", 2: " (two seeds)"}
    return verdict + few.get(count, "")


def _pair(left, right, resamples):
    """Return description, differences, their significance, and signs of diverged seeds; or a final verdict."""
    text, values, sure = _compared(left, right, resamples)
    signs, words = _won(left, right)
    if not values and not signs:
        return {"found": text, "verdict": "not clear", "why": "neither translates"} if text else _open(left, right)
    return "; ".join(part for part in (text, words) if part), values, sure, signs


def _higher(left, right, resamples):
    found = _pair(left, right, resamples)
    if isinstance(found, dict):
        return found
    text, values, sure, signs = found
    both = [*values, *signs]
    known = sure or not values  # a diverged seed does not make small differences of other seeds significant
    if known and all(value > 0 for value in both):
        return {"found": text, "verdict": _said("yes", len(both))}
    if known and all(value < 0 for value in both):
        why = "the opposite holds" + (", significantly" if sure else "")
        return {"found": text, "verdict": _said("no", len(both)), "why": why}
    why = "losses need three seeds" if "loss" in text and len(values) < 3 else "not significant"
    return {"found": text, "verdict": "not clear", "why": "seeds differ" if sure and signs else why}


def _as_good(left, right, resamples):
    """Judge "as good" by the margin first, since a small difference can be significant.

    With three or more seeds, the mean must be significantly above the margin.
    """
    found = _pair(left, right, resamples)
    if isinstance(found, dict):
        return found
    text, values, sure, signs = found
    near = not values or statistics.fmean(values) >= -MARGIN
    count = len(values) + len(signs)
    above = p_over_seeds([value + MARGIN for value in values])
    if near and -1 not in signs and (above is None or above < LEVEL):
        return {"found": text, "verdict": _said("yes", count)}
    if 1 not in signs and all(value < 0 for value in values) and (not values or sure and not near):
        return {"found": text, "verdict": _said("no", count), "why": "worse" + (", significantly" if sure else "")}
    less = "less than {} lower, but not significantly" if near else "more than {} lower, but not significantly"
    return {"found": text, "verdict": "not clear", "why": "seeds differ" if signs else less.format(MARGIN)}


def _learned(record):
    """Return whether the model uses its source and, if it was scored, translates, by seed, and a description."""
    found, texts = {}, []
    for seed in record["done"]:
        gain = record["seeds"][seed].get("source_gain")
        if gain is not None:
            losses = list((record.get("curve") or {}).get(str(seed), {}).values())
            lost = bool(losses) and losses[-1] - min(losses) > RISE
            score = record["seeds"][seed].get("bleu", math.inf)
            found[seed] = gain > LEARNED and not lost and score >= LEAST_BLEU
            text = f"{gain:.2f}" + (f" ({score:.2f} BLEU)" if score < LEAST_BLEU else "")
            texts.append(text + (f" (loss {min(losses):.2f}, at the end {losses[-1]:.2f})" if lost else ""))
    broken = _diverged(record)
    found.update(dict.fromkeys(broken, False))
    words = [f"source gain {', '.join(texts)}"] if texts else []
    words += [f"seed {seed}: {reason}" for seed, reason in broken.items()]
    return found, "; ".join(words) + _of_wanted(record, len(found))


def _trains(record, _, __):
    found, text = _learned(record)
    if not found:
        return _open(record)
    if all(found.values()):
        return {"found": text, "verdict": _said("yes", len(found))}
    verdict = "not clear" if any(found.values()) else _said("no", len(found))
    return {"found": text, "verdict": verdict, "why": "it ignores its source, or does not translate"}


def _fails(record, _, __):
    found, text = _learned(record)
    if not found:
        return _open(record)
    if not any(found.values()):
        return {"found": text, "verdict": _said("yes", len(found))}
    verdict = _said("no", len(found)) if all(found.values()) else "not clear"
    return {"found": text, "verdict": verdict, "why": "it uses its source"}


def _faster(left, right):
    if not left or not right:
        return {"found": "-", "verdict": "open", "why": "not measured"}
    ratio = left["tokens_per_second"] / right["tokens_per_second"]
    text = f"{ratio:.2f} times the tokens per second"
    if min(left["rounds"]) > max(right["rounds"]):
        return {"found": text, "verdict": "yes"}
    if max(left["rounds"]) < min(right["rounds"]):
        return {"found": text, "verdict": "no", "why": "slower in every round"}
    return {"found": text, "verdict": "not clear", "why": "the rounds overlap"}


def _fits(left, right, measure):
    """Compare one seed, without a significance test."""
    if not left or not right:
        return {"found": "-", "verdict": "open", "why": "not measured"}
    text = f"{left[measure]:.2f} and {right[measure]:.2f}"
    if measure.endswith("ppl"):
        better = not math.isnan(left[measure]) and not right[measure] <= left[measure]
    else:
        better = left[measure] > right[measure]
    return {"found": text, "verdict": _said("yes" if better else "no", 1)}


def _open(*records):
    """Return the verdict "open" for systems that were not trained or did not fail because of their method."""
    missing = [record["label"] for record in records if not record["done"]]
    failed = [reason[:120] for record in records for reason in record["failed"].values()]
    why = f"not trained: {', '.join(missing)}" if missing else "not measured, or not with the same seeds"
    return {"found": "-", "verdict": "open", "why": "; ".join([why, *failed])}
