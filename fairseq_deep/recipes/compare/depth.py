"""``compare --depths``: all systems with several encoder depths, and a test whether depth pays.

The primary test is the slope of the validation loss on log2 of the depth: one slope per seed, Student's t over the
seeds. The second test compares the deepest encoder with the shallowest, in pairs with the same seed. Both are corrected
for the number of systems by Holm's method.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from statistics import linear_regression
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import write_json
from fairseq_deep.tools.output_files import write_text
from fairseq_deep.tools.results import holm, over_seeds

from .systems import System
from .table import markdown
from .tune import inside

LEAST = 0.02
"""Minimum gain of the deepest encoder for the verdict "yes", in nats per token."""
LEVEL, SEEDS = 0.05, 5
"""Significance level, and minimum number of seeds for a verdict."""


def parse(text: str) -> list[int]:
    """Parse the depths of ``--depths 6,12,24``.

    Raises:
        UsageError: there are fewer than two, one is not a positive whole number, or one is repeated
    """
    words = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]*", word) for word in words) or len({*words}) < max(2, len(words)):
        raise UsageError(f"--depths must be two or more different numbers of encoder layers, such as 6,12,24, not "
                         f"'{text}'")  # fmt: skip
    return sorted(map(int, words))


def expand(systems: list[System], depths: list[int]) -> list[System]:
    """Return each system with each depth; LABEL_6 is LABEL with 6 encoder layers."""
    for system in systems:
        if any(flag.partition("=")[0] == "--encoder-layers" for flag in system.flags):
            raise UsageError(f"{system.label}: --depths sets --encoder-layers: omit one of them")
    return [
        replace(system, label=f"{system.label}_{depth}", line=system.label, depth=depth,
                flags=[*system.flags, "--encoder-layers", str(depth)])
        for system in systems for depth in depths
    ]  # fmt: skip


def judge(rows: list[dict[str, Any]], planned: int) -> list[dict[str, Any]]:
    """Test the effect of depth for each line of *rows*, which have ``line`` and ``depth``.

    Args:
        planned: number of lines of the comparison, with those that are not finished

    Returns:
        for each line: ``slope`` and ``gain`` by seed, in nats per token (gain: shallowest minus deepest, > 0 is
        better), their p with Holm's correction (None for fewer than three seeds), ``bleu`` (deepest minus shallowest,
        mean, or None), ``tuned`` (a search found the learning rate of each depth inside its grid), ``failed`` (depths
        with runs that failed) and ``pays``: "yes", "no" or "not clear"
    """
    found = [_of_line([row for row in rows if row["line"] == line]) for line in dict.fromkeys(r["line"] for r in rows)]
    for test in ("slope", "gain"):
        corrected = holm([over_seeds([*each[test].values()]).get("p") for each in found], planned)
        for each, p in zip(found, corrected):
            each[f"p_{test}"] = p
    for each in found:
        each["pays"] = _verdict(each)
    return found


def _of_line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: row["depth"])
    seeds = sorted(set.intersection(*({*row["done"]} for row in rows)))
    depths, first, last = [row["depth"] for row in rows], rows[0], rows[-1]
    nll = {seed: [_nats(row["seeds"][seed]) for row in rows] for seed in seeds}
    scored = [s for s in seeds if "bleu" in first["seeds"][s] and "bleu" in last["seeds"][s]]
    bleu = [last["seeds"][seed]["bleu"] - first["seeds"][seed]["bleu"] for seed in scored]
    return {
        "line": rows[0]["line"], "depths": depths,
        "slope": {seed: linear_regression([*map(math.log2, depths)], values).slope for seed, values in nll.items()},
        "gain": {seed: values[0] - values[-1] for seed, values in nll.items()},
        "bleu": statistics.fmean(bleu) if bleu else None,
        "failed": [row["depth"] for row in rows if row["failed"]],
        "tuned": all(inside({float(rate): loss for rate, loss in row["tuned"].items()}) for row in rows),
    }  # fmt: skip


def _nats(figures: dict[str, Any]) -> float:
    """Return the negative log-likelihood per token; fairseq logs it with more digits than a perplexity below 14."""
    nll = figures.get("valid_nll")
    return math.log(figures["valid_ppl"]) if nll is None else nll * math.log(2)


def _verdict(found: dict[str, Any]) -> str:
    gains, p = [*found["gain"].values()], found["p_gain"]
    if not found["tuned"] or found["failed"] or len(gains) < SEEDS or p is None or p >= LEVEL:
        return "not clear"
    gain = statistics.fmean(gains)
    if gain > LEAST and found["bleu"] is not None and found["bleu"] > 0:
        return "yes"
    return "no" if gain <= 0 else "not clear"


def page(found: list[dict[str, Any]], unfinished: Sequence[str] = (), searched: int | None = None) -> str:
    """Return the text of ``depth.md``.

    Args:
        found: what `judge` returned
        unfinished: lines that have a depth without a finished run
        searched: updates of a search for learning rates that was shorter than the runs
    """
    head = ["system", "encoder layers", "seeds", "slope of nll", "p (Holm)", "gain of the deepest", "p (Holm)",
            "BLEU", "depth pays"]  # fmt: skip
    cells = [head]
    for each in found:
        values = [*each["gain"].values()]
        row = [each["line"], ", ".join(map(str, each["depths"])), str(len(values))]
        for test in ("slope", "gain"):
            row += [_shown([*each[test].values()]), "-" if each[f"p_{test}"] is None else f"{each[f'p_{test}']:.3f}"]
        cells.append([*row, "-" if each["bleu"] is None else f"{each['bleu']:+.2f}", each["pays"]])
    notes = (
        "Slope: nats per token per doubling of the depth, mean over seeds [minimum, maximum]; negative if depth helps. "
        "Gain: improvement of the deepest encoder over the shallowest with the same seed, in nats per token. p: "
        "Student's t over the seeds, with Holm's correction over the systems. BLEU: deepest minus shallowest. Depth "
        f"pays if the gain is above {LEAST} with p < {LEVEL} over {SEEDS} seeds or more, and BLEU is higher. A verdict "
        "requires tuned learning rates (--tune lr) inside their grids, and no failed run."
    )
    failed = (f"{each['line']} with {', '.join(map(str, each['failed']))} layers" for each in found if each["failed"])
    remarks = {
        "Learning rates are not tuned, or at an edge of their grid": ", ".join(
            each["line"] for each in found if not each["tuned"]
        ),
        "Runs failed, and the others are a selection": "; ".join(failed),
        "A depth without a finished run": ", ".join(unfinished),
    }
    notes += "".join(f" {remark}: {value}." for remark, value in remarks.items() if value)
    if searched:
        notes += (f" The search for learning rates had {searched:,} updates, fewer than the runs: a rate that is best "
                  "in short runs can be too high.")  # fmt: skip
    return f"{markdown(cells, left=(0,))}\n\n{notes}\n"


def report(folder: str, rows: list[dict[str, Any]], searched: int | None) -> None:
    """Write ``depth.md``, ``depth.json`` and, with matplotlib, ``depth.png``; for *searched* see `page`."""
    unfinished = {row["line"]: None for row in rows if not row["done"]}
    complete = [row for row in rows if row["line"] not in unfinished]
    if not complete:
        return
    found = judge(complete, len({row["line"] for row in rows}))
    text = page(found, [*unfinished], searched)
    write_text(os.path.join(folder, "depth.md"), text)
    write_json(os.path.join(folder, "depth.json"), found)
    print(f"\n{text}")
    with contextlib.suppress(ImportError):
        from . import picture

        picture.draw_depths(complete, os.path.join(folder, "depth.png"))


def _shown(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.fmean(values):+.3f} [{min(values):+.3f}, {max(values):+.3f}]"
