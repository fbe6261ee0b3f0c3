"""What came out of the trainings of a comparison: figures of each seed, their spread, and the paired bootstrap."""

import math
import os
import re
import statistics

from fairseq_deep.recipes.record import read_json, read_records
from fairseq_deep.recipes.seeds import spread
from fairseq_deep.runtime.records import RESULT
from fairseq_deep.tools.significance import paired_bootstrap, read_run

SPEED = re.compile(r"\(([\d.]+) sentences/s, ([\d.]+) tokens/s\)")
# figures that have a mean and a spread over the seeds
FIGURES = (
    "valid_loss", "valid_ppl", "equal_time", "bleu", "difference", "chrf", "source_gain", "step_seconds",
    "tokens_per_second", "sentences_per_second", "ratio_encoder", "ratio_decoder", "between_encoder", "between_decoder",
)  # fmt: skip
FACTS = ("tokens_per_update", "updates", "precision", "devices", "hardware", "commit", "date")


def rows(systems, runs, resamples):
    """One record for each system; the first is what the others are compared with.

    Returns:
        for each system "done" and "failed" (its seeds), "seeds" (figures by seed), "curve" (loss by seed and update),
        and for each of ``FIGURES`` mean, least, most and standard deviation
    """
    found = [_row(system, [run for run in runs if run.system is system]) for system in systems]
    first = found[0]
    for row in found[1:]:
        for seed in [seed for seed in row["done"] if seed in first["done"] and "bleu" in first["seeds"][seed]]:
            difference = row["seeds"][seed]["bleu"] - first["seeds"][seed]["bleu"]
            row["seeds"][seed].update(difference=round(difference, 2))
    if resamples and any("bleu" in figures for row in found for figures in row["seeds"].values()):
        bootstrap(found, resamples)
    steps = {row["system"]: _median([row["seeds"][seed]["step_seconds"] for seed in row["done"]]) for row in found}
    losses = equal_time({row["system"]: row["curve"] for row in found}, steps)
    for row in found:
        for seed in row["done"]:
            row["seeds"][seed]["equal_time"] = losses.get(row["system"], {}).get(seed)
        for figure in FIGURES:
            row[figure] = spread([row["seeds"][seed].get(figure) for seed in row["done"]])
    return found


def _row(system, runs):
    row = {"system": system.label, "command": system.text, "parameters": None, "done": [], "failed": {}, "seeds": {}}
    row.update(wanted=[run.seed for run in runs], curve={}, folders={})
    for run in runs:
        if run.is_done():
            row["done"].append(run.seed)
            row["seeds"][run.seed], row["curve"][run.seed] = _figures(run.folder)
            row["parameters"] = row["parameters"] or row["seeds"][run.seed]["parameters"]
            row["folders"][run.seed] = run.folder
        elif os.path.exists(run.failure):
            with open(run.failure, encoding="utf-8") as stream:
                row["failed"][run.seed] = stream.read().strip()
    return row


def equal_time(curves, steps):
    """The losses at the time when the fastest of the systems had done all of its updates.

    Args:
        curves: loss by system, seed and update
        steps: seconds of an update by system; what has none is left out

    Returns:
        by system and seed; None where there was no validation yet
    """
    timed = {system: seeds for system, seeds in curves.items() if steps.get(system)}
    end = min((steps[system] * max(curve) for system, seeds in timed.items() for curve in seeds.values()), default=0)
    return {
        system: {seed: loss_at(curve, end / steps[system]) for seed, curve in seeds.items()}
        for system, seeds in timed.items()
    }


def loss_at(curve, updates):
    """The loss after so many *updates*, between two validations on a straight line; None before the first."""
    before = [update for update in curve if update <= updates]
    after = [update for update in curve if update >= updates]
    if not before or not after:
        return curve[max(curve)] if before else None
    low, high = max(before), min(after)
    share = (updates - low) / (high - low) if high > low else 0.0
    return curve[low] + share * (curve[high] - curve[low])


def _diagnosed(folder):
    """What ``Run.diagnose`` has measured."""
    models = read_json(os.path.join(folder, "diagnose.json")).get("models")
    if not models:
        return {}
    mean = models[0]["mean"]
    ends = {f"between_{side}": values[-1] for side, values in mean["stream_between"].items() if values}
    return {"source_gain": mean["source_gain"], **ends}


def _figures(folder):
    result = read_json(os.path.join(folder, "RESULT.json"), RESULT)
    records = read_records(folder)
    # of what was done twice, after a stop, the second time counts
    inner = {int(record["num_updates"]): record for record in records if record["kind"] == "train_inner"}
    valid = {int(record["valid_num_updates"]): record for record in records if record["kind"] == "valid"}
    curve = {update: float(valid[update]["valid_loss"]) for update in sorted(valid)}
    best = min(curve, key=lambda update: math.inf if math.isnan(curve[update]) else curve[update])
    speeds = []
    if "bleu" in result:
        with open(os.path.join(folder, "logs", "6-generate.log"), encoding="utf-8", errors="replace") as stream:
            speeds = SPEED.findall(stream.read())
    # medians, because the interval in which there is a validation holds it, too; words per batch and per second,
    # because they have more digits than the updates per second
    steps = [float(r["wpb"]) / float(r["wps"]) for r in inner.values() if float(r.get("wps", 0)) > 0]
    figures = {
        **{measure: result[measure] for measure in ("bleu", "chrf") if measure in result},
        **_diagnosed(folder),
        "parameters": result["parameters"],
        "valid_loss": curve[best],
        "valid_ppl": float(valid[best]["valid_ppl"]),
        "step_seconds": _median(steps),
        "sentences_per_second": float(speeds[-1][0]) if speeds else None,
        "tokens_per_second": float(speeds[-1][1]) if speeds else None,
        "ratio_encoder": _median([float(r["ratio_enc"]) for r in inner.values() if "ratio_enc" in r]),
        "ratio_decoder": _median([float(r["ratio_dec"]) for r in inner.values() if "ratio_dec" in r]),
    }
    return {**figures, **{fact: result.get(fact) for fact in (*FACTS, "signature")}}, curve


def _median(values):
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def bootstrap(found, resamples):
    """The paired bootstrap between the first system and each other, seed by seed: adds "p" to the figures."""
    from sacrebleu.metrics import BLEU

    first = found[0]
    for seed in first["done"]:
        others = [row for row in found[1:] if seed in row["done"]]
        if not others:
            continue
        _, references = read_run(first["folders"][seed])
        named = [(row["system"], read_run(row["folders"][seed])[0]) for row in (first, *others)]
        measured = paired_bootstrap(named, references, {"BLEU": BLEU(force=True)}, resamples)["BLEU"]
        for row, result in zip(others, measured.results[1:]):
            row["seeds"][seed].update(p=result.p_value)
        first["seeds"][seed].update(bootstrap=measured.signature)


def facts(found):
    """What should be the same everywhere: one value each, or all of them where it is not."""
    figures = [row["seeds"][seed] for row in found for seed in row["done"]]
    shared = {}
    for name in (*FACTS, "signature", "bootstrap"):
        values = dict.fromkeys(str(entry[name]) for entry in figures if entry.get(name) is not None)
        shared[name] = "; ".join(values)
    return shared
