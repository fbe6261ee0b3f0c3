"""``compare --depths``: all systems with several encoder depths, and a test whether depth pays.

The test compares the deepest encoder with the shallowest, in pairs with the same seed, by Student's t over the seeds,
with Holm's correction for the number of systems.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import write_json
from fairseq_deep.tools.output_files import write_text
from fairseq_deep.tools.results import holm, over_seeds, spread

from .systems import System
from .table import markdown, show
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
        for each line: ``gain`` by seed, in nats per token (shallowest minus deepest, > 0 is better), its p with Holm's
        correction (None for fewer than three seeds), ``bleu`` (deepest minus shallowest, mean, or None), ``tuned`` (a
        search found the learning rate of each depth inside its grid), ``failed`` (depths with runs that failed) and
        ``pays``: "yes", "no" or "not clear"
    """
    found = [_of_line([row for row in rows if row["line"] == line]) for line in dict.fromkeys(r["line"] for r in rows)]
    corrected = holm([over_seeds([*each["gain"].values()]).get("p") for each in found], planned)
    for each, p in zip(found, corrected):
        each["p"] = p
        each["pays"] = _verdict(each)
    return found


def _of_line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: row["depth"])
    seeds = sorted(set.intersection(*({*row["done"]} for row in rows)))
    first, last = rows[0], rows[-1]
    scored = [s for s in seeds if "bleu" in first["seeds"][s] and "bleu" in last["seeds"][s]]
    bleu = [last["seeds"][seed]["bleu"] - first["seeds"][seed]["bleu"] for seed in scored]
    return {
        "line": rows[0]["line"], "depths": [row["depth"] for row in rows],
        "gain": {seed: _nats(first["seeds"][seed]) - _nats(last["seeds"][seed]) for seed in seeds},
        "bleu": statistics.fmean(bleu) if bleu else None,
        "failed": [row["depth"] for row in rows if row["failed"]],
        "tuned": all(inside({float(rate): loss for rate, loss in row["tuned"].items()}) for row in rows),
    }  # fmt: skip


def _nats(figures: dict[str, Any]) -> float:
    """Return the negative log-likelihood per token; fairseq logs it with more digits than a perplexity below 14."""
    nll = figures.get("valid_nll")
    return math.log(figures["valid_ppl"]) if nll is None else nll * math.log(2)


def _verdict(found: dict[str, Any]) -> str:
    gains, p = [*found["gain"].values()], found["p"]
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
    cells = [["system", "encoder layers", "seeds", "gain of the deepest", "p (Holm)", "BLEU", "depth pays"]]
    for each in found:
        gain = spread([*each["gain"].values()])
        cells.append([each["line"], ", ".join(map(str, each["depths"])), str(len(each["gain"])),
                      show(gain, "+.3f", True), show(each["p"], ".3f", False), show(each["bleu"], "+.2f", False),
                      each["pays"]])  # fmt: skip
    notes = (
        "Gain: improvement of the deepest encoder over the shallowest with the same seed, in nats per token, mean over "
        "seeds [minimum, maximum]. p: "
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
