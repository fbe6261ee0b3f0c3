"""Execution of an experiment's commands: output is logged, progress is shown, and signals are forwarded.

:class:`Supervisor` runs one command at a time. A watcher reads its output: :class:`Plain` shows the last line,
:class:`Train` parses fairseq's JSON lines, and :class:`Generate` counts and stores translations.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.records import TRAINED, read_json_lines

from .display import Display, clock
from .nodes import Failed, Launch
from .record import commit

STOPPED = 75  # exit status of training that saved a checkpoint after a signal
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8} \| (?:INFO \| [\w.]+ \| )?")
WIDTH = 90
BASIS, SHARE = 30, 0.05
"""Seconds, or share of the work, after which a mean speed gives an estimate of the time left."""
JSON_LINE = re.compile(r"\| INFO \| (train_inner|train|valid)\b\S* \| (\{.*\})\s*$")


def end_line(stream):
    """Terminate the last line of a file that a full disk or a power cut may have truncated."""
    size = stream.seek(0, os.SEEK_END)
    if size:
        stream.seek(size - 1)
        if stream.read(1) != "\n":
            stream.write("\n")


class Plain:
    """Watcher that shows the last line of output, for commands without progress."""

    def __init__(self, every: float = 10, name: str = ""):
        self.display, self.name, self.begun, self.last = Display(every), name, time.time(), "no output yet"
        self.printed = ""

    def read(self, line):
        """Store the line without fairseq's time and module; lists of all settings are ignored."""
        words = LOG_PREFIX.sub("", line).strip()
        if words and not words.startswith(("Namespace(", "{")):
            self.last = words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."

    def tick(self, words=""):
        """Show progress; without bars, only if it has changed."""
        words = words or self.last
        if self.display.bars is None and words == self.printed:
            return
        if self.display.is_due():
            self.printed = words
        self.display.show(self.name, note=words, line=f"{clock(time.time() - self.begun)}: {words}")

    def finish(self, ok):
        """Return a problem that the exit status does not report."""


class Echo(Plain):
    """Watcher that prints all output."""

    def read(self, line):
        """Print *line*."""
        print(line, end="", flush=True)

    def tick(self, words=""):
        """Do nothing, since all output is printed."""


class Train(Plain):
    """Watcher of fairseq-train with ``--log-format json``: shows epoch, update, loss and time left."""

    def __init__(self, jsonl: str, limits: dict[str, str], every: float = 10):
        super().__init__(every, "train")
        numbers = {name: float(value) if value else None for name, value in limits.items()}
        self.limits = {"update": numbers["--max-epoch"], "num_updates": numbers["--max-update"]}
        self.stop_hours = max(0, numbers["--stop-time-hours"] or 0)  # of all sessions together
        self.earlier = _seconds_of(jsonl)
        self.jsonl = open(jsonl, "a+", encoding="utf-8", errors="replace")
        end_line(self.jsonl)
        self.first, self.training = None, False
        self.session = round(self.begun)
        self.unsaid = {"commit": commit()}  # may differ from the commit that began the experiment

    def read(self, line):
        super().read(line)
        self.training = self.training or "begin training epoch" in line
        match = JSON_LINE.search(line)
        if not match:
            return
        kind, stats = match.group(1), json.loads(match.group(2))
        if self.unsaid:
            self.note("session", self.unsaid)
            self.unsaid = None
        self.note(kind, stats)
        if kind == "valid":
            best = stats.get("valid_best_loss", stats["valid_loss"])
            loss, ppl = stats["valid_loss"], stats["valid_ppl"]
            self.display.print(f"  epoch {stats['epoch']:>3}  valid: loss {loss}  ppl {ppl}  best loss {best}")
        elif kind == "train_inner":
            self.show(stats)

    def note(self, kind, facts):
        record = {"kind": kind, "time": round(time.time(), 1), "session": self.session, **facts}
        self.jsonl.write(json.dumps(record) + "\n")
        self.jsonl.flush()

    def show(self, stats):
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

    def seconds_left(self, stats):
        """Return the time to the nearest limit, at the mean speed since the first line; None: not known yet."""
        begun, first = self.first
        elapsed, guesses = time.time() - begun, []
        for key, limit in self.limits.items():
            done = float(stats[key]) - float(first[key])
            if limit and done > 0 and (elapsed >= BASIS or done >= SHARE * limit):
                guesses.append((limit - float(stats[key])) * elapsed / done)
            elif limit:  # it may be the nearest
                return None
        if self.stop_hours:
            guesses.append(self.begun - self.earlier + self.stop_hours * 3600 - time.time())
        return min(guesses) if guesses else None

    def tick(self, words=""):
        if self.first is None:
            super().tick("first updates, no statistics yet" if self.training else "")

    def finish(self, ok):
        self.jsonl.close()


def _seconds_of(jsonl):
    """Return the duration of all sessions in a ``train.jsonl``; 0 if it is missing or corrupt."""
    sessions = {}
    with contextlib.suppress(OSError, UsageError):
        for line in read_json_lines(jsonl, TRAINED):
            sessions[line["session"]] = line["time"] - line["session"]
    return sum(sessions.values())


class Generate(Plain):
    """Watcher that counts and stores translations; a missing sentence is an error, and empty lines remain empty."""

    def __init__(self, source: str, out: str):
        super().__init__(name=f"translate {os.path.basename(source)}")
        with open(source, encoding="utf-8") as stream:
            self.empty = [not line.strip() for line in stream]
        self.out = out
        self.stream = open(out + ".new", "w", encoding="utf-8")
        self.seen = set()

    def read(self, line):
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

    def tick(self, words=""):
        self.display.show(self.name, len(self.seen), len(self.empty), "sentences")

    def finish(self, ok):
        self.stream.close()
        if ok and len(self.seen) != len(self.empty):
            return f"only {len(self.seen)} of {len(self.empty)} sentences were translated"
        if ok:
            os.replace(self.out + ".new", self.out)
        else:
            os.remove(self.out + ".new")


def is_alive(pid):
    """Return whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return True  # not Linux, or the process has just ended: the next call will tell


def end_with_parent():
    """Have Linux send SIGTERM to this process when its parent ends for any reason, including kill -9."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Stopped(Exception):
    """A signal from the user has stopped the run."""


class Supervisor:
    """Runs commands, and forwards SIGINT, SIGTERM and SIGUSR1 to the running one.

    Args:
        owners: processes; when one of them ends, the running command is stopped
    """

    def __init__(self, owners: list[int] | None = None):
        self.owners, self.send, self.stopping, self.launch, self.starting = owners or [], None, False, None, False

    def install(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        already, self.stopping = self.stopping, True
        if self.send is None:
            if not already:
                raise Stopped
        elif number != signal.SIGINT or self.launch is not None or self.starting:  # Ctrl-C also reaches the command
            self.send(number)

    def run(self, command: list[str], log: str, watch: Plain, launch: Launch | None = None) -> None:
        """Run *command* with its output in the file *log*.

        Raises:
            Stopped: a signal has stopped the command
            Failed: the command has failed
        """
        with open(log, "a", encoding="utf-8") as stream:
            watch.name = watch.name or " ".join(os.path.basename(word) for word in command[:2] if word[:1] != "-")
            with watch.display:
                status = self._follow(watch, command, stream, launch)
            problem = watch.finish(status == 0)
            if status < 0 and not problem:
                problem = f"{'torchrun ' if launch else ''}ended by signal {-status} (out of memory?)"
            elif status and launch:
                problem = launch.problem(STOPPED)
                status = 1 if problem else STOPPED
            if problem:
                stream.write(problem + "\n")
        ended = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1, 130, 143, STOPPED)
        if status in ended or self.stopping and status:
            raise Stopped
        if status or problem:
            raise Failed(last_words(log))
        if self.stopping:
            raise Stopped

    def _follow(self, watch: Plain, command: list[str], log: Any, launch: Launch | None) -> int:
        early = [signal.SIGTERM] * self.stopping  # signals while the command starts, which it receives afterwards
        self.starting, self.send = True, early.append
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
                errors="replace", preexec_fn=end_with_parent, start_new_session=launch is not None, pass_fds=LOCKS,
            )  # fmt: skip
        except OSError as problem:
            log.write(f"{command[0]}: {problem.strerror}\n")
            self.starting, self.send = False, None
            return 127
        self.launch, self.send = launch, functools.partial(_send, child, launch)
        self.starting = False
        for number in early:
            self.send(number)
        stop = threading.Event()
        ticker = threading.Thread(target=self._keep_ticking, args=(watch, stop, child), daemon=True)
        ticker.start()
        for line in child.stdout:
            log.write(line)
            log.flush()
            watch.read(line)
            if launch:
                launch.read(line)
        status = child.wait()
        self.send = None
        stop.set()
        ticker.join()
        return status

    def _keep_ticking(self, watch: Plain, stop: threading.Event, child: Any) -> None:
        """Show progress every second; stop the command when one of its owners has ended."""
        told = False
        while not stop.wait(1):
            watch.tick()
            if self.launch:
                self.launch.tick(child)
            if not told and not all(map(is_alive, self.owners)):
                self.send(signal.SIGTERM)
                told = True  # a second signal would interrupt saving the checkpoint


LOCKS: list[int] = []
"""Descriptors of locked files; all commands inherit them, so locks are held until the last command has ended."""


def _send(child: Any, launch: Launch | None, number: int) -> None:
    if launch is None:
        child.send_signal(number)
    else:
        launch.send(child, number)


def last_words(log: str) -> str:
    """Return the last non-empty line of a log."""
    try:
        with open(log, encoding="utf-8", errors="replace") as stream:
            lines = [line.rstrip("\n") for line in stream if line.strip()]
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "no output"
