"""The table of a comparison: ``table.md`` for readers, ``table.json`` for programs."""

from __future__ import annotations

import json
import os
from typing import Any

from fairseq_deep.recipes.compare.results import REPORTING, Row
from fairseq_deep.recipes.compare.tune import format_rates
from fairseq_deep.tools.output_files import write_text

# column, figure and number format
COLUMNS = (
    ("valid loss", "valid_loss", ".3f"),
    ("at equal time", "equal_time", ".3f"),
    ("BLEU", "bleu", ".2f"),
    ("difference", "difference", "+.2f"),
    ("± 95 %", "half", ".2f"),
    ("p", "p", ".3f"),
    ("p equal", "p_equal", ".3f"),
    ("chrF", "chrf", ".2f"),
    ("source gain", "source_gain", ".2f"),
    ("step (s)", "step_seconds", ".3f"),
    ("decoding (tokens/s)", "tokens_per_second", ".0f"),
    ("gradient, encoder", "ratio_encoder", ".2f"),
    ("decoder", "ratio_decoder", ".2f"),
    ("between, encoder", "between_encoder", ".2g"),
    ("decoder", "between_decoder", ".2g"),
)
SPREAD = ("valid_loss", "bleu", "difference")  # shown with minimum and maximum


def write(folder: str, rows: list[Row], facts: dict[str, str]) -> str:
    """Write both files, and return the text of the first."""
    text = f"{_lay_out(rows)}\n\n{_notes(rows, facts)}\n"
    write_text(os.path.join(folder, "table.md"), text)
    write_text(os.path.join(folder, "table.json"), json.dumps({**facts, "systems": rows}, indent=1) + "\n")
    return text


def _lay_out(rows: list[Row]) -> str:
    parts = [name for name in rows[0] if name.startswith("bleu ") and name != f"bleu {REPORTING}"]
    possible = [*COLUMNS[:3], *((f"BLEU, {name[5:]}", name, ".2f") for name in parts), *COLUMNS[3:]]
    columns = [column for column in possible if any(_value(row, column[1]) is not None for row in rows)]
    head = ["system", "seeds", "parameters", *(name for name, _, _ in columns)]
    return markdown([head, *(_cells(row, columns) for row in rows)], left=(0,))


def markdown(cells: list[list[str]], left: tuple[int, ...]) -> str:
    """Format a Markdown table from rows of strings, header first; columns with an index in *left* are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = ["-" * width if index in left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    lines = []
    for row in cells:
        pairs = enumerate(zip(row, widths))
        lines.append([cell.ljust(width) if index in left else cell.rjust(width) for index, (cell, width) in pairs])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _value(row: Row, figure: str) -> Any:
    return row["tests"].get(figure, row.get(figure))


def _cells(row: Row, columns: list[tuple[str, str, str]]) -> list[str]:
    cells = [row["system"], seeds(row), f"{row['parameters']:,}" if row["parameters"] else "-"]
    return [*cells, *(show(_value(row, figure), form, figure in SPREAD) for _, figure, form in columns)]


def seeds(row: Row) -> str:
    """Describe the numbers of finished, wanted and failed seeds."""
    done, wanted = len(row["done"]), len(row["wanted"])
    text = str(done) if done == wanted else f"{done} of {wanted}"
    return f"{text} ({len(row['failed'])} FAILED)" if row["failed"] else text


def show(value: dict[str, Any] | float | None, form: str, with_spread: bool) -> str:
    """Format a number or a mean, with minimum and maximum over seeds if *with_spread*."""
    if not isinstance(value, dict):
        return "-" if value is None else format(value, form)
    mean = format(value["mean"], form)
    if not with_spread or value["std"] is None:
        return mean
    return f"{mean} [{format(value['min'], form)}, {format(value['max'], form)}]"


def _notes(rows: list[Row], facts: dict[str, str]) -> str:
    wanted = sorted({seed for row in rows for seed in row["wanted"]})
    lines = [
        f"{facts['updates']} updates of {facts['tokens_per_update']} tokens, seeds {', '.join(map(str, wanted))}, "
        f"{facts['precision']}, {facts['devices']} ({facts['hardware']}), commit {facts['commit']}, {facts['date']}",
        "Mean over seeds [minimum, maximum]. valid loss: best loss on the validation set; at equal time: loss at the "
        f"end of the fastest system, from updates and steps; difference: BLEU minus BLEU of {rows[0]['system']} with "
        "the same seed; source gain: increase of the loss with another sentence's source, in nats per sub-word (0: "
        "source ignored); step, decoding: measured during the runs, next to other runs; gradient: ratio of the "
        "gradient norms of first and last layer, median over training; between: share of the last layer's variance "
        "between positions." + _tests(rows),
        f"BLEU: {facts['signature'] or '-'}",
    ]
    lines += [f"{row['system']}: {row['command']}" for row in rows]
    lines += [
        f"FAILED: {row['system']}, seed {seed}: {reason}" for row in rows for seed, reason in row["failed"].items()
    ]
    for row in rows:
        if row["tuned"]:
            rates = format_rates({float(rate): loss for rate, loss in row["tuned"].items()})
            lines.append(f"{row['system']}: learning rates (valid loss) {rates}")
    if not facts["updates"]:  # all runs failed
        lines[0] = f"seeds {', '.join(map(str, wanted))}"
    return "\n\n".join([*lines[:3], "\n".join(f"- {line}" for line in lines[3:])])


def _tests(rows: list[Row]) -> str:
    """Describe the tests over seeds and the parts of the test set, if there are any."""
    margins = [f"{row['tests']['margin']:g}" for row in rows if row["tests"]]
    text = " Over seeds (Student's t): ± 95 %: half of the confidence interval of the difference; p: of no difference; "
    text = f"{text}p equal: of a difference of {margins[0]} BLEU or more (two one-sided tests)." if margins else ""
    half = " BLEU, chrF and tests: reporting half of the test set." if f"bleu {REPORTING}" in rows[0] else ""
    return text + half
