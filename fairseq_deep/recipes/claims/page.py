"""The page of a claim: the paper's statement, our results, the verdicts, and pictures."""

import os
import subprocess
import sys

from fairseq_deep.recipes.compare.results import equal_time
from fairseq_deep.recipes.compare.table import markdown, show
from fairseq_deep.recipes.compare.table import seeds as _seeds
from fairseq_deep.tools import write_text
from fairseq_deep.tools.results import spread

# column, figure, format, whether to show minimum and maximum over seeds
COLUMNS = (
    ("valid loss", "valid_loss", ".3f", True),
    ("BLEU", "bleu", ".2f", True),
    ("chrF", "chrf", ".1f", False),
    ("source gain", "source_gain", ".2f", False),
)
FIT = (("train BLEU", "train_bleu"), ("dev BLEU", "dev_bleu"), ("train ppl", "train_ppl"), ("dev ppl", "dev_ppl"))


def write(folder, claim, records, verdicts, facts, timed, fitted):
    """Write ``claim.md`` and return its text."""
    parts = [
        f"# {claim.title}",
        f"{claim.source}. {claim.sentence}",
        markdown(_table(records, timed, fitted), left=(0, 1)),
        markdown(_statements(verdicts), left=(0, 1, 2)),
        _notes(records, facts, timed),
    ]
    text = "\n\n".join(parts) + "\n"
    write_text(os.path.join(folder, "claim.md"), text)
    return text


def _table(records, timed, fitted):
    columns = [column for column in COLUMNS if any(record.get(column[1]) for record in records)]
    base = next((timed[record["label"]] for record in records if record["label"] in timed), None)
    head = ["system", "paper's BLEU", "seeds", "parameters", *(column[0] for column in columns)]
    head += [name for name, _ in FIT] if fitted else []
    head += ["decoding (tokens/s)", "relative", "step (s)", "loss at equal time"] if base else []
    equal = losses_at_equal_time(records, timed)
    rows = [head]
    for record in records:
        parameters = record.get("parameters")
        row = [record["label"], record["paper"], _seeds(record), f"{parameters:,}" if parameters else "-"]
        row += [show(record.get(figure), form, seeds) for _, figure, form, seeds in columns]
        if fitted:
            own = fitted.get(record["label"], {})
            row += [f"{own[key]:.2f}" if key in own else "-" for _, key in FIT]
        if base:
            row += _times(timed.get(record["label"]), base, equal.get(record["label"]))
        rows.append(row)
    return rows


def _times(own, base, loss):
    if not own:
        return ["-"] * 4
    relative = own["tokens_per_second"] / base["tokens_per_second"]
    return [
        f"{own['tokens_per_second']:.0f}",
        f"{relative:.2f}",
        f"{own['step_seconds']:.3f}",
        show(loss, ".3f", False),
    ]


def losses_at_equal_time(records, timed):
    """Return {label: valid loss over the seeds at the end of the fastest system}, from step times of the rounds."""
    curves = {
        record["label"]: {
            seed: {int(update): loss for update, loss in curve.items()} for seed, curve in record["curve"].items()
        }
        for record in records
        if record["done"]
    }
    steps = {label: figures["step_seconds"] for label, figures in timed.items()}
    return {label: spread(losses.values()) for label, losses in equal_time(curves, steps).items()}


def _statements(verdicts):
    rows = [["statement", "here", "holds"]]
    for verdict in verdicts:
        why = f": {verdict['why']}" if verdict.get("why") else ""
        rows.append([verdict["text"], verdict["found"], verdict["verdict"] + why])
    return rows


def _notes(records, facts, timed):
    where = f"{facts.get('updates')} updates of {facts.get('tokens_per_update')} tokens, {facts.get('precision')}, "
    where += f"{facts.get('devices')} ({facts.get('hardware')}), commit {facts.get('commit')}, {facts.get('date')}."
    lines = [
        where,
        "Values are means over seeds [minimum, maximum]. Differences pair equal seeds. p: sacreBLEU's paired bootstrap "
        "per seed (one-tailed), and Student's t over three or more seeds. yes: confirmed in each seed, and the second "
        "p is below 0.05; with fewer seeds, the first p is below 0.025, which does not extend to other seeds. no "
        "worse: at most 0.5 BLEU lower on average, with three or more seeds significantly. There is no correction for "
        "multiple tests: one in twenty statements may be confirmed by chance. "
        "source gain: increase of the loss with another sentence's source, in nats per sub-word; above 0.1, the model "
        "has learned to use its source, within these updates.",
    ]
    if timed:
        lines.append("Times: medians of rounds, each with all systems in turn; decoding of the validation set.")
    if facts.get("signature"):
        lines.append(f"BLEU: {facts['signature']}; bootstrap: {facts.get('bootstrap') or '-'}")
    systems = "\n".join(f"- {record['label']}: {record.get('command', 'not trained')}" for record in records)
    return "\n\n".join([*lines, systems])


def pictures(folder, claim, records, timed):
    """Draw the claim's pictures in addition to compare's, and return a list of the pictures as text."""
    drawn = ["picture.png"]
    try:
        from fairseq_deep.recipes.compare import by_depth
    except ImportError as error:
        return f"no picture: {error}; pip install matplotlib"
    if "depth" in claim.extras and any(record["done"] for record in records):
        by_depth.draw(records, timed, os.path.join(folder, "depth.png"))
        drawn.append("depth.png")
    if "weights" in claim.extras and records[0]["done"]:
        run = records[0]["folders"][records[0]["done"][0]]
        words = ["plot", "weights", os.path.join(run, "checkpoints", "checkpoint_last.pt")]
        words += ["--output", os.path.join(folder, "weights.png")]
        if not subprocess.run([sys.executable, "-m", "fairseq_deep", *words], stdout=subprocess.DEVNULL).returncode:
            drawn.append("weights.png")
    return ", ".join(drawn)
