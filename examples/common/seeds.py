"""What came out of several seeds: mean, standard deviation, least and most, in ``RESULT.json`` and a short table."""

import argparse
import json
import math
import os
import statistics

from corpus import die, run
from records import RESULT
from report import read_json, write_text

from fairseq_deep.tools import format_table

# name in RESULT.json, head of the column, its form
FIGURES = (
    ("bleu", "BLEU", "{:.2f}"),
    ("chrf", "chrF", "{:.2f}"),
    ("valid_ppl", "valid ppl", "{:.2f}"),
    ("best_valid_ppl", "best", "{:.2f}"),
    ("difference", "difference", "{:+.2f}"),
    ("p", "p", "{:.3f}"),
)
ROWS = (("mean", "mean"), ("std", "std"), ("least", "min"), ("most", "max"))


def figures(record):
    """Return what is put side by side of one seed's record; ``difference`` and ``p`` are those of BLEU."""
    score = record["scores"].get("test", {}).get("sacrebleu", {})
    other = score.get("against", {}).get("measures", {}).get("BLEU", {})
    known = {"bleu": score.get("bleu"), "chrf": score.get("chrf")}
    known.update((name, record.get(name)) for name in ("valid_ppl", "best_valid_ppl"))
    known.update((name, other.get(name)) for name in ("difference", "p"))
    return {name: value for name, value in known.items() if value is not None}


def spread(values):
    """Mean, standard deviation (None for one value), least and most of those that are not None; None without any."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    ends = (min(values), max(values)) if not any(map(math.isnan, values)) else (math.nan, math.nan)
    deviation = None
    if len(values) > 1:
        deviation = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return {"mean": statistics.fmean(values), "std": deviation, "min": ends[0], "max": ends[1]}


def collect(exp, seeds, failed):
    """Return the record of all seeds, and the figures of each."""
    records = {seed: read_json(os.path.join(exp, f"seed{seed}", "RESULT.json"), RESULT) for seed in seeds}
    for seed, record in records.items():
        if not record:
            die(f"{exp}/seed{seed}/RESULT.json is missing: run again with --stage 7")
    found = {seed: figures(record) for seed, record in records.items()}
    summary = {}
    for name, _, _ in FIGURES:
        values = spread([row.get(name) for row in found.values()])
        if values and name != "p":
            summary[name] = values
    signatures = dict.fromkeys(record["signature"] for record in records.values() if "signature" in record)
    facts = {"signature": "; ".join(signatures), "seeds": seeds, "failed": failed, "runs": records}
    return {**summary, **facts}, found


def table(summary, found, failed):
    """Lay out a line for each seed and for each of ``ROWS``."""
    columns = [column for column in FIGURES if any(column[0] in row for row in found.values())]
    lines = [["seed", *(head for _, head, _ in columns)]]
    for seed in sorted([*found, *failed]):
        row = found.get(seed, {})
        cells = [form.format(row[name]) if name in row else "-" for name, _, form in columns]
        lines.append([str(seed), *cells] if seed in found else [str(seed), "FAILED", *cells[1:]])
    for label, key in ROWS:
        values = [summary.get(name, {}).get(key) for name, _, _ in columns]
        forms = [form if key != "std" else "{:.2f}" for _, _, form in columns]
        lines.append([label, *("" if value is None else form.format(value) for form, value in zip(forms, values))])
    return format_table(lines, right=range(1, len(columns) + 1), indent="  ")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exp", required=True, help="folder with a seedN for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="those that have come to their end")
    parser.add_argument("--failed", type=int, nargs="*", default=[])
    args = parser.parse_args()
    summary, found = collect(args.exp, args.seeds, args.failed)
    write_text(os.path.join(args.exp, "RESULT.json"), json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    print()
    print(table(summary, found, args.failed))
    scored = "bleu" in summary
    print(f"  signature {summary['signature']}" if scored else "  not translated")
    print(f"  record    {os.path.join(args.exp, 'RESULT.json')}")
    if scored:
        print(f"BLEU = {summary['bleu']['mean']:.2f}")


if __name__ == "__main__":
    run(main)
