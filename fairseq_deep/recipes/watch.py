"""Watchers of an experiment's commands: they read the output, show progress, and write records and translations.

:class:`Watch` shows the last line, :class:`Train` parses fairseq's JSON lines, and :class:`Generate` counts and stores
translations.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from typing import IO, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import TRAINED, read_json_lines

from .display import Display, clock
from .record import commit

LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8} \| (?:INFO \| [\w.]+ \| )?")
WIDTH = 90
BASIS, SHARE = 30, 0.05
"""Seconds, or share of the work, after which a mean speed gives an estimate of the time left."""
JSON_LINE = re.compile(r"\| INFO \| (train_inner|train|valid)\b\S* \| (\{.*\})\s*$")


class Watch:
    """Watcher that shows the last line of output, for commands without progress.

    Args:
        display: shows progress
        name: name of the command; empty: its first words
    """

    def __init__(self, display: Display | None = None, name: str = ""):
        self.display, self.name, self.begun = display or Display(), name, time.time()
        self.last, self.printed = "no output yet", ""

    def read(self, line: str) -> None:
        """Store the line without fairseq's time and module; lists of all settings are ignored."""
        words = LOG_PREFIX.sub("", line).strip()
        if words and not words.startswith(("Namespace(", "{")):
            self.last = words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."

    def tick(self, words: str = "") -> None:
        """Show progress; without bars, only if it has changed."""
        words = words or self.last
        if self.display.bars is None and words == self.printed:
            return
        if self.display.is_due():
            self.printed = words
        self.display.show(self.name, note=words, line=f"{clock(time.time() - self.begun)}: {words}")

    def finish(self, ok: bool) -> str | None:
        """Return a problem that the exit status does not report."""
        return None


class Echo(Watch):
    """Watcher that prints all output."""

    def read(self, line: str) -> None:
        """Print *line*."""
        print(line, end="", flush=True)

    def tick(self, words: str = "") -> None:
        """Do nothing, since all output is printed."""


class Train(Watch):
    """Watcher of fairseq-train with ``--log-format json``: shows epoch, update, loss and time left."""

    def __init__(self, jsonl: str, limits: dict[str, str], display: Display | None = None):
        super().__init__(display, "train")
        numbers = {name: float(value) if value else None for name, value in limits.items()}
        self.limits = {"update": numbers["--max-epoch"], "num_updates": numbers["--max-update"]}
        self.stop_hours = max(0, numbers["--stop-time-hours"] or 0)  # of all sessions together
        self.earlier = _seconds_of(jsonl)
        self.jsonl = open(jsonl, "a+", encoding="utf-8", errors="replace")
        _end_line(self.jsonl)
        self.first: tuple[float, dict[str, Any]] | None = None
        self.training, self.session = False, round(self.begun)
        self.unsaid: dict[str, str] = {"commit": commit()}  # may differ from the commit that began the experiment

    def read(self, line: str) -> None:
        super().read(line)
        self.training = self.training or "begin training epoch" in line
        match = JSON_LINE.search(line)
        if not match:
            return
        kind, stats = match.group(1), json.loads(match.group(2))
        if self.unsaid:
            self.note("session", self.unsaid)
            self.unsaid = {}
        self.note(kind, stats)
        if kind == "valid":
            best = stats.get("valid_best_loss", stats["valid_loss"])
            loss, ppl = stats["valid_loss"], stats["valid_ppl"]
            self.display.print(f"  epoch {stats['epoch']:>3}  valid: loss {loss}  ppl {ppl}  best loss {best}")
        elif kind == "train_inner":
            self.show(stats)

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """Append a line to ``train.jsonl``."""
        record = {"kind": kind, "time": round(time.time(), 1), "session": self.session, **facts}
        self.jsonl.write(json.dumps(record) + "\n")
        self.jsonl.flush()

    def show(self, stats: dict[str, Any]) -> None:
        """Show the values of a line of fairseq's log."""
        if self.first is None:
            self.first, self.display.due = (time.time(), stats), 0  # show the first line immediately
        left, epoch = self.seconds_left(stats), f"epoch {stats['epoch']:>3}"
        speed = f"{float(stats['wps']):,.0f} words/s" if stats.get("wps") else ""
        loss = f"loss {stats['loss']:>6}  ppl {stats['ppl']:>8}  {speed:>16}".rstrip()
        line = f"{epoch}  update {stats['num_updates']:>6}  {loss}  {'' if left is None else f'left {clock(left)}'}"
        goals = [(float(stats[key]) / limit, round(float(stats[key]), 1), limit, unit)
                 for (key, limit), unit in zip(self.limits.items(), ("epochs", "updates")) if limit]  # fmt: skip
        _, done, total, unit = max(goals, default=(0, float(stats["num_updates"]), None, "updates"))
        note = " ".join(f"{epoch} {loss}".split())
        self.display.show(self.name, done, total, unit, note, math.inf if left is None else left, line.rstrip())

    def seconds_left(self, stats: dict[str, Any]) -> float | None:
        """Return the time to the nearest limit, at the mean speed since the first line; None: not known yet."""
        assert self.first is not None
        begun, first = self.first
        elapsed, guesses = time.time() - begun, list[float]()
        for key, limit in self.limits.items():
            done = float(stats[key]) - float(first[key])
            if limit and done > 0 and (elapsed >= BASIS or done >= SHARE * limit):
                guesses.append((limit - float(stats[key])) * elapsed / done)
            elif limit:  # it may be the nearest
                return None
        if self.stop_hours:
            guesses.append(self.begun - self.earlier + self.stop_hours * 3600 - time.time())
        return min(guesses) if guesses else None

    def tick(self, words: str = "") -> None:
        if self.first is None:
            super().tick("first updates, no statistics yet" if self.training else "")

    def finish(self, ok: bool) -> str | None:
        self.jsonl.close()
        return None


def _end_line(stream: IO[str]) -> None:
    """Terminate the last line of a file that a full disk or a power cut may have truncated."""
    size = stream.seek(0, os.SEEK_END)
    if size:
        stream.seek(size - 1)
        if stream.read(1) != "\n":
            stream.write("\n")


def _seconds_of(jsonl: str) -> float:
    """Return the duration of all sessions in a ``train.jsonl``; 0 if it is missing or corrupt."""
    sessions: dict[float, float] = {}
    with contextlib.suppress(OSError, UsageError):
        for line in read_json_lines(jsonl, TRAINED):
            sessions[line["session"]] = line["time"] - line["session"]
    return sum(sessions.values())


class Generate(Watch):
    """Watcher that counts and stores translations; a missing sentence is an error, and empty lines remain empty."""

    def __init__(self, source: str, out: str, display: Display | None = None):
        super().__init__(display, f"translate {os.path.basename(source)}")
        with open(source, encoding="utf-8") as stream:
            self.empty = [not line.strip() for line in stream]
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

    def tick(self, words: str = "") -> None:
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
