"""Trainings in forked processes, in which one chosen write to a folder goes wrong.

Everything is imported once, so that such a training takes a fraction of a second and each write can be tried in turn.
What counts as a write: opening a file for writing, each block that goes to the system, fsync, rename and remove.
"""

import builtins
import errno
import io
import os
import re
import signal
import sys
import traceback
from pathlib import Path

KINDS = ("EIO", "ENOSPC", "kill")
KILLED = -signal.SIGKILL


class Faults:
    """Makes the write number *at* fail, and for ENOSPC all later ones that need room; 0: counts alone."""

    def __init__(self, folder, kind="", at=0):
        self.folder, self.kind, self.at, self.count = os.path.realpath(folder), kind, at, 0

    def covers(self, path):
        return isinstance(path, (str, os.PathLike)) and os.path.realpath(path).startswith(self.folder)

    def point(self, needs_room=True):
        """One write: returns, raises, or never returns."""
        self.count += 1
        if self.count == self.at and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.at and self.kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.at and self.count >= self.at and self.kind == "ENOSPC" and needs_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self):
        faults, real_open = self, builtins.open
        names = {name: getattr(os, name) for name in ("replace", "rename", "remove", "unlink")}
        fsync = os.fsync

        class Raw(io.FileIO):
            def write(self, data):
                half = memoryview(data).cast("B")[: len(data) // 2]
                last = faults.count + 1 == faults.at
                if last:
                    super().write(half)  # the disk takes some of it
                faults.point()
                return super().write(data)

        def opening(path, mode="r", *rest, **options):
            if not faults.covers(path) or not set(mode) & set("wax+"):
                return real_open(path, mode, *rest, **options)
            faults.point()
            raw = io.BufferedWriter(Raw(path, mode.replace("b", "").replace("t", "")), 65536)
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

        def wrapped(function):
            def changed(path, *rest, **options):
                if faults.covers(path):
                    faults.point(needs_room=False)
                return function(path, *rest, **options)

            return changed

        def synced(number):
            faults.point()
            return fsync(number)

        builtins.open = io.open = opening
        os.fsync = synced
        for name, function in names.items():
            setattr(os, name, wrapped(function))


class Signal(Faults):
    """Sends a signal to the training itself in the middle of the update after *update*."""

    def __init__(self, folder, number, update):
        super().__init__(folder)
        self.number, self.update = number, update

    def install(self):
        from fairseq.trainer import Trainer

        super().install()
        real = Trainer.train_step

        def train_step(trainer, *rest, **options):
            if trainer.get_num_updates() == self.update:
                os.kill(os.getpid(), self.number)
            return real(trainer, *rest, **options)

        Trainer.train_step = train_step


def train(command, log, faults):
    """Run fairseq-train's *command* (its name, then arguments) in a fork; exit status and writes that were counted.

    The status is negative for a signal, as of subprocess; all output is in the file *log*.
    """
    import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes seconds)

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _child([str(word) for word in command], log, faults, writer)
        finally:
            os._exit(70)  # whatever happens, no test goes on in the fork
    os.close(writer)
    counted = os.read(reader, 20)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), int(counted or 0)


def _child(command, log, faults, writer):
    from fairseq_cli import train as fairseq_train

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
    _log_to(sys.stdout)
    sys.argv = command
    faults.install()
    status = 0
    try:
        fairseq_train.cli_main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    os.write(writer, str(faults.count).encode())
    os._exit(status)


def _log_to(stream):
    import logging

    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    logging.basicConfig(format="%(levelname)s | %(name)s | %(message)s", level=logging.INFO, stream=stream)


def losses(log):
    """{update: loss as it was printed} of the file *log*."""
    found = re.findall(r'train_inner \| \{.*?"num_updates": "(\d+)".*', Path(log).read_text())
    lines = re.findall(r"train_inner \| (\{.*\})", Path(log).read_text())
    return {int(update): re.search(r'"loss": "([^"]+)"', line)[1] for update, line in zip(found, lines)}
