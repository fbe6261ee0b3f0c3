"""Watchers of an experiment's commands: they read the output, show progress, and write records and translations.

:class:`Watch` shows the last line, :class:`Train` parses fairseq's JSON lines, and :class:`Generate` counts and stores
translations.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_deep.tools.input_text import iterate_lines

from .display import Display
from .record import commit, training_facts

LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8} \| (?:INFO \| [\w.]+ \| )?")
WIDTH = 90
TRAIN = "train"
"""The name of training in displays."""
UNITS = ("epochs", "updates", "minutes")
JSON_LINE = re.compile(r"\| INFO \| (train_inner|train|valid)\b\S* \| (\{.*\})\s*$")


class Watch:
    """Watcher that shows the last line of output, for commands without progress.

    Args:
        display: shows progress
        name: name of the command; empty: its first words
    """

    def __init__(self, display: Display | None = None, name: str = "") -> None:
        self.display, self.name, self.last = display or Display(), name, "no output yet"

    def read(self, line: str) -> None:
        """Store the line without fairseq's time and module; lists of all settings are ignored."""
        words = LOG_PREFIX.sub("", line).strip()
        if words and not words.startswith(("Namespace(", "{")):
            self.last = words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."

    def tick(self) -> None:
        """Show progress."""
        self.display.show(self.name, note=self.last)

    def finish(self, ok: bool) -> str | None:
        """Return a problem that the exit status does not report."""
        return None


class Echo(Watch):
    """Watcher that prints all output."""

    def read(self, line: str) -> None:
        """Print *line*."""
        print(line, end="", flush=True)

    def tick(self) -> None:
        """Do nothing, since all output is printed."""


class Train(Watch):
    """Watcher of fairseq-train with ``--log-format json``: shows progress to the nearest limit, and the loss.

    Args:
        exp: directory of the run; ``train.jsonl`` gets all values
        limits: values of ``--max-epoch``, ``--max-update`` and ``--stop-time-hours``, of all sessions together
    """

    def __init__(self, exp: str, limits: Sequence[float], display: Display | None = None) -> None:
        super().__init__(display, TRAIN)
        epochs, updates, hours = limits
        self.limits, self.earlier = (epochs, updates, 60 * hours), 3600 * training_facts(exp).get("train_hours", 0.0)
        path = os.path.join(exp, "train.jsonl")
        self.jsonl = open(path, "a", encoding="utf-8")
        if Path(path).read_bytes()[-1:] not in (b"", b"\n"):
            self.jsonl.write("\n")  # a full disk or a power cut has truncated the last line
        self.begun, self.training, self.shown = time.time(), False, False

    def read(self, line: str) -> None:
        super().read(line)
        self.training = self.training or "begin training epoch" in line
        match = JSON_LINE.search(line)
        if not match:
            return
        kind, stats = match.group(1), json.loads(match.group(2))
        if not self.shown:  # the commit may differ from the one that began the experiment
            self.note("session", {"commit": commit()})
            self.shown, self.display.due = True, 0  # show the first values immediately
        self.note(kind, stats)
        if kind == "valid":
            best = stats.get("valid_best_loss", stats["valid_loss"])
            loss, ppl = stats["valid_loss"], stats["valid_ppl"]
            self.display.print(f"  epoch {stats['epoch']:>3}  valid: loss {loss}  ppl {ppl}  best loss {best}")
        elif kind == "train_inner":
            self.show(stats)

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """Append a line to ``train.jsonl``."""
        record = {"kind": kind, "time": round(time.time(), 1), "session": round(self.begun), **facts}
        self.jsonl.write(json.dumps(record) + "\n")
        self.jsonl.flush()

    def show(self, stats: dict[str, Any]) -> None:
        """Show the values of a line of fairseq's log."""
        updates, minutes = float(stats["num_updates"]), (self.earlier + time.time() - self.begun) / 60
        goals = [(done / limit, round(done, 1), limit, unit)
                 for done, limit, unit in zip((float(stats["update"]), updates, minutes), self.limits, UNITS)
                 if limit > 0]  # fmt: skip
        _, done, total, unit = max(goals, default=(0, updates, None, "updates"))
        speed = f" {float(stats['wps']):,.0f} words/s" if stats.get("wps") else ""
        note = f"epoch {stats['epoch']} loss {stats['loss']} ppl {stats['ppl']}{speed}"
        self.display.show(self.name, done, total, unit, note)

    def tick(self) -> None:
        if self.training:
            self.last = "first updates, no statistics yet"
        if not self.shown:
            super().tick()

    def finish(self, ok: bool) -> str | None:
        self.jsonl.close()
        return None


class Generate(Watch):
    """Watcher that counts and stores translations; a missing sentence is an error, and empty lines remain empty."""

    def __init__(self, source: str, out: str, display: Display | None = None) -> None:
        super().__init__(display, f"translate {os.path.basename(source)}")
        self.empty = [not line.strip() for line in iterate_lines(source)]
        self.out = out
        self.stream = open(out + ".new", "w", encoding="utf-8")
        self.seen: set[int] = set()

    def read(self, line: str) -> None:
        super().read(line)
        kind, tab, rest = line.partition("\t")
        match = re.fullmatch(r"([STHDP])-(\d+)", kind)
        if match:
            letter, index = match.group(1), int(match.group(2))
            if letter == "H":
                self.seen.add(index)
            if self.empty[index] and letter in "HD":
                line = f"{kind}{tab}{rest.partition(tab)[0].strip()}{tab}\n"
        self.stream.write(line)

    def tick(self) -> None:
        self.display.show(self.name, len(self.seen), len(self.empty), "sentences")

    def finish(self, ok: bool) -> str | None:
        self.stream.close()
        if ok and len(self.seen) != len(self.empty):
            return f"only {len(self.seen)} of {len(self.empty)} sentences were translated"
        if ok:
            os.replace(self.out + ".new", self.out)
        else:
            os.remove(self.out + ".new")
        return None
