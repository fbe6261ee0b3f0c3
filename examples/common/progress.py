"""Run a command with all its output in a log, and show how far it is: one short line every few seconds.

``--mode train`` reads fairseq's JSON lines and keeps them in ``--jsonl``, with the commit of each session;
``--mode generate`` counts translations and keeps them in ``--out`` if none is missing; any other command gets a sign of
life.  The exit status is 1 if the command failed, so that it is never taken for the recipe's own status of bad input.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from nodes import Launch
from report import commit

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STOPPED = 75  # of a training that a signal has ended and that has saved
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8} \| (?:INFO \| [\w.]+ \| )?")
WIDTH = 90
JSON_LINE = re.compile(r"\| INFO \| (train_inner|train|valid)\b\S* \| (\{.*\})\s*$")


def clock(seconds):
    seconds = max(0, int(seconds))
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 60} min {seconds % 60:02} s"


def end_line(stream):
    """Begin a new line in what a full disk or a power cut may have torn."""
    size = stream.seek(0, os.SEEK_END)
    if size:
        stream.seek(size - 1)
        if stream.read(1) != "\n":
            stream.write("\n")


class Plain:
    """A sign of life for commands that have no progress of their own."""

    def __init__(self, args):
        self.every, self.begun, self.last = args.every, time.time(), "no output yet"
        self.due = self.begun + args.every

    def read(self, line):
        """Remember what the line says, without fairseq's time and module, and no list of all settings."""
        words = LOG_PREFIX.sub("", line).strip()
        if words and not words.startswith(("Namespace(", "{")):
            self.last = words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."

    def tick(self):
        if time.time() >= self.due:
            self.due = time.time() + self.every
            say(f"{clock(time.time() - self.begun)}: {self.last}")

    def finish(self, ok):
        pass


class Train(Plain):
    """Epoch, update, loss and the time left of fairseq-train with ``--log-format json``."""

    def __init__(self, args):
        super().__init__(args)
        self.limits = {"update": args.max_epoch, "num_updates": args.max_update}
        self.stop_hours = args.stop_hours
        self.jsonl = open(args.jsonl, "a+", encoding="utf-8", errors="replace")
        end_line(self.jsonl)
        self.first, self.training = None, False
        self.session = round(self.begun)
        self.unsaid = {"commit": commit(ROOT)}  # the folder may be of an older one

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
            say(f"epoch {stats['epoch']:>3}  valid: loss {loss}  ppl {ppl}  best loss {best}")
        elif kind == "train_inner":
            self.show(stats)

    def note(self, kind, facts):
        record = {"kind": kind, "time": round(time.time(), 1), "session": self.session, **facts}
        self.jsonl.write(json.dumps(record) + "\n")
        self.jsonl.flush()

    def show(self, stats):
        self.first = self.first or (time.time(), stats)
        if time.time() < self.due - (self.every if self.first[1] is stats else 0):
            return
        self.due = time.time() + self.every
        left = self.seconds_left(stats)
        speed = f"{float(stats['wps']):,.0f} words/s" if stats.get("wps") else ""
        place = f"epoch {stats['epoch']:>3}  update {stats['num_updates']:>6}"
        left = f"left {clock(left)}" if left is not None else ""
        say(f"{place}  loss {stats['loss']:>6}  ppl {stats['ppl']:>8}  {speed:>16}  {left}".rstrip())

    def seconds_left(self, stats):
        """The nearest of the limits, at the mean pace since the first line."""
        begun, first = self.first
        guesses = []
        for key, limit in self.limits.items():
            done = float(stats[key]) - float(first[key])
            if limit and done > 0:
                guesses.append((limit - float(stats[key])) * (time.time() - begun) / done)
        if self.stop_hours:
            guesses.append(self.begun + self.stop_hours * 3600 - time.time())
        return min(guesses) if guesses else None

    def tick(self):
        if self.first is None and time.time() >= self.due:
            self.due = time.time() + self.every
            what = "first updates, no figures yet" if self.training else self.last
            say(f"{clock(time.time() - self.begun)}: {what}")

    def finish(self, ok):
        self.jsonl.close()


class Generate(Plain):
    """Counts translations; a run that lost a sentence is a failed run, and empty lines stay empty."""

    def __init__(self, args):
        super().__init__(args)
        with open(args.total, encoding="utf-8") as stream:
            self.empty = [not line.strip() for line in stream]
        self.out = args.out
        self.stream = open(args.out + ".new", "w", encoding="utf-8")
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

    def tick(self):
        if time.time() >= self.due:
            self.due = time.time() + self.every
            say(f"{len(self.seen):,} of {len(self.empty):,} sentences translated")

    def finish(self, ok):
        self.stream.close()
        if ok and len(self.seen) != len(self.empty):
            return f"only {len(self.seen)} of {len(self.empty)} sentences were translated"
        if ok:
            os.replace(self.out + ".new", self.out)
        else:
            os.remove(self.out + ".new")


def say(text):
    print(f"  {text}", flush=True)


def is_alive(pid):
    """Whether the process runs; one that has ended and that nobody has waited for does not."""
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
        return True  # not Linux, or gone meanwhile: the next look says


def end_with_parent():
    """Have Linux send SIGTERM to this process when its parent ends in any way, kill -9 included."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def keep_ticking(watch, stop, child, owners, launch, send):
    """Show progress every second; end ``child`` when one of the processes that want it is gone."""
    told = False
    while not stop.wait(1):
        watch.tick()
        if launch:
            launch.tick(child)
        if not told and not all(map(is_alive, owners)):
            send(signal.SIGTERM)
            told = True  # a second signal would end a training that is saving


def follow(watch, command, log, owners=(), launch=None):
    """Run ``command``, feed ``watch`` and ``log``; return the exit status.

    Args:
        launch: where the command is torchrun, what knows its processes
    """
    early = []
    send = early.append  # until there is somebody to send it to
    # The terminal sends Ctrl-C to the command as well; it ends, and then so do we. Torchrun is kept from it.
    for number in (signal.SIGTERM, signal.SIGUSR1, *([] if launch is None else [signal.SIGINT])):
        signal.signal(number, lambda number, _: send(number))
    try:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
            preexec_fn=end_with_parent, start_new_session=launch is not None,
        )  # fmt: skip
    except OSError as problem:
        log.write(f"{command[0]}: {problem.strerror}\n")
        return 127
    send = child.send_signal if launch is None else functools.partial(launch.send, child)
    if launch is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in early:
        send(number)
    stop = threading.Event()
    ticker = threading.Thread(target=keep_ticking, args=(watch, stop, child, owners, launch, send), daemon=True)
    ticker.start()
    for line in child.stdout:
        log.write(line)
        log.flush()
        watch.read(line)
        if launch:
            launch.read(line)
    status = child.wait()
    stop.set()
    ticker.join()
    return status


def number(text):
    return float(text) if text else None


def numbers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("plain", "train", "generate"), default="plain")
    parser.add_argument("--log", required=True)
    parser.add_argument("--owner", type=numbers, default=[], help="processes without which the command is to end: N,N")
    parser.add_argument("--every", type=float, default=10, help="seconds between two lines")
    parser.add_argument("--jsonl", help="train: file to append fairseq's records to")
    for flag in ("--max-epoch", "--max-update", "--stop-hours"):
        parser.add_argument(flag, type=number, help="train: where it ends")
    parser.add_argument("--total", help="generate: the text that is translated")
    parser.add_argument("--out", help="generate: file for the translations")
    parser.add_argument("--torchrun", action="store_true", help="the command is torchrun")
    parser.add_argument("--peers", type=json.loads, help="what the other machines have left so far: nodes.py look")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    launch = Launch(args.peers) if args.torchrun else None
    watch = {"plain": Plain, "train": Train, "generate": Generate}[args.mode](args)
    with open(args.log, "a", encoding="utf-8") as log:
        status = follow(watch, args.command, log, args.owner, launch)
        problem = watch.finish(status == 0)
        if status < 0 and not problem:
            problem = f"{'torchrun ' if launch else ''}ended by signal {-status} (out of memory?)"
        elif status and launch:
            problem = launch.problem(STOPPED)
            status = 1 if problem else STOPPED
        if problem:
            log.write(problem + "\n")
    if status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1, 130, 143, STOPPED):
        return 130
    return 1 if status or problem else 0


if __name__ == "__main__":
    sys.exit(main())
