"""The tables at the end of a recipe: of a run, and of several seeds with their common ``RESULT.json``."""

from __future__ import annotations

import os
import shlex
from typing import Any

from fairseq_deep.runtime.records import RESULT
from fairseq_deep.tools.input_text import text_of
from fairseq_deep.tools.results import spread
from fairseq_deep.tools.tables import format_table

from .record import read_json, write_json

COLUMNS = {
    "bleu": ("BLEU", ".2f"), "chrf": ("chrF", ".2f"), "valid_ppl": ("valid ppl", ".2f"),
    "best_valid_ppl": ("best", ".2f"), "difference": ("difference", "+.2f"), "p": ("p", ".3f"),
}  # fmt: skip
"""Values of ``RESULT.json``: head and format in the table."""


def samples(exp: str, source_lang: str, target_lang: str, count: int = 3) -> list[tuple[str, ...]]:
    """Choose a few short translations, evenly distributed over the test set: (source, ours, reference)."""
    names = (os.path.join("text", "raw", f"test.{source_lang}"), f"test.hyp.{target_lang}", f"test.ref.{target_lang}")
    paths = (os.path.join(exp, name) for name in names)
    short = [row for row in zip(*(text_of(path).split("\n") for path in paths)) if row[0] and max(map(len, row)) <= 110]
    return [short[len(short) * k // count] for k in range(min(count, len(short)))]


def difference(against: dict[str, Any]) -> str:
    """Describe the difference to the other system and its significance."""
    parts = [f"{name} {found['difference']:+.2f} (p {found['p']:.3f})" for name, found in against["measures"].items()]
    return f"{against['system']}: {', '.join(parts)}"


def table_rows(exp: str, record: dict[str, Any], target_lang: str) -> list[tuple[str, str]]:
    """Return the rows of the table of results: label and value."""
    scores = record["scores"].get("test")
    updates, epochs, minutes = record.get("updates", 0), record.get("epochs", 0), 60 * record.get("train_hours", 0)
    rows = [
        ("parameters", f"{record['parameters']:,}" if record["parameters"] else "unknown"),
        ("training", f"{updates:,} updates to epoch {epochs}, {minutes:.1f} minutes"),
        ("valid ppl", f"{record.get('valid_ppl', '-')} (best {record.get('best_valid_ppl', '-')})"),
        ("hardware", record["hardware"] or "unknown"),
    ]
    if not scores:
        return rows + [("record", os.path.join(exp, "RESULT.json"))]
    rows.append(("sacreBLEU", f"{record['bleu']:.2f}  {record['signature']}"))
    for key, label in (("tokenised", "tokenised"), ("compound_split", "comp. split")):
        if scores[key]:
            rows.append((label, f"{scores[key]['bleu']:.2f}  (not comparable with the line above)"))
    others = {name: found["sacrebleu"]["bleu"] for name, found in record["scores"].items() if name[4:].isdigit()}
    if others:
        names = ", ".join(f"{name} {bleu:.2f}" for name, bleu in others.items())
        rows.append(("other sets", f"{names}; mean of all test sets {record['mean_bleu']:.2f}"))
    if "measures" in scores["sacrebleu"].get("against", {}):  # a multilingual score has pairs instead
        rows.append(("against", difference(scores["sacrebleu"]["against"])))
    files = (("output", f"test.hyp.{target_lang}"), ("model", "averaged.pt"), ("record", "RESULT.json"))
    return rows + [(label, os.path.join(exp, name)) for label, name in files]


def print_table(exp: str, langs: tuple[str, str], record: dict[str, Any]) -> None:
    """Print a few translations and the table of results."""
    print()
    scored = "bleu" in record
    for source, ours, reference in samples(exp, *langs) if scored else []:
        print(f"  {langs[0]:11} {source}\n  {'ours':11} {ours}\n  {'reference':11} {reference}\n")
    for label, value in table_rows(exp, record, langs[1]):
        print(f"  {label:11} {value}")
    print_next(exp)
    if scored:
        print(f"BLEU = {record['bleu']:.2f}")


def print_next(exp: str) -> None:
    """Print commands for the trained model in *exp*."""
    print(f"  {'next':11} fairseq-deep translate {shlex.quote(exp)} --input FILE")
    print(f"  {'':11} fairseq-deep package {shlex.quote(exp)} --output DIR")


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one seed for the table; ``difference`` and ``p`` refer to BLEU."""
    score = record["scores"].get("test", {}).get("sacrebleu", {})
    other = score.get("against", {}).get("measures", {}).get("BLEU", {})
    found = {name: place.get(name) for place in (other, record, score) for name in COLUMNS if name in place}
    return {name: value for name, value in found.items() if value is not None}


def summarise(exp: str, seeds: list[int], failed: list[int]) -> None:
    """Write the record of all seeds and print their table; nothing without a finished one."""
    if not seeds:
        return
    path = os.path.join(exp, "RESULT.json")
    records = {seed: read_json(os.path.join(exp, f"seed{seed}", "RESULT.json"), RESULT) for seed in seeds}
    found = {seed: figures(record) for seed, record in records.items()}
    spreads = {name: spread([row.get(name) for row in found.values()]) for name in COLUMNS}
    summary = {name: values for name, values in spreads.items() if values and name != "p"}
    signature = "; ".join(dict.fromkeys(record["signature"] for record in records.values() if "signature" in record))
    write_json(path, {**summary, "signature": signature, "seeds": seeds, "failed": failed, "runs": records})
    rows = {f"{seed}": found[seed] for seed in seeds} | {f"{seed} FAILED": {} for seed in failed}
    for label, key in (("mean", "mean"), ("std", "std"), ("least", "min"), ("most", "max")):
        rows[label] = {name: values[key] for name, values in summary.items() if values[key] is not None}
    columns = [name for name, values in spreads.items() if values]
    lines = [["seed", *(COLUMNS[name][0] for name in columns)]]
    for label, row in rows.items():
        lines.append([label, *(format(row[name], COLUMNS[name][1]) if name in row else "-" for name in columns)])
    print()
    print(format_table(lines, right=range(1, len(columns) + 1), indent="  "))
    print(f"  signature {signature}" if "bleu" in summary else "  not translated")
    print(f"  record    {path}")
    print_next(os.path.join(exp, f"seed{seeds[0]}"))
    if "bleu" in summary:
        print(f"BLEU = {summary['bleu']['mean']:.2f}")
