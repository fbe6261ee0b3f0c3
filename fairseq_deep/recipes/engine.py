"""The engine of the experiments: runs commands, any number at a time, logs their output, and forwards signals.

All commands run in one event loop. Each has its own process group. The group receives SIGTERM when this process
receives one of ``SIGNALS``; fairseq-train then saves a checkpoint. The command itself also receives it when this
process ends for any other reason, such as ``kill -9``.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from fairseq_deep.errors import UsageError

from . import lock
from .watch import Watch

STOPPED = 75
"""Exit status of a training that has saved a checkpoint after a signal."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDED = {*(-number for number in SIGNALS), 130, 143, STOPPED}
"""Exit statuses of commands that a signal has stopped."""
BLOCK = 1 << 16


class Stopped(Exception):
    """A signal from the user has stopped the run."""


class Failed(Exception):
    """A command has failed; the message is the reason, if known."""


class Engine:
    """Runs commands and forwards signals to them; a context manager, which handles signals and holds locks.

    Attributes:
        stopping: number of the first signal that has arrived; 0: none
    """

    def __init__(self) -> None:
        self.stopping = 0
        self._locks: list[int] = []  # commands inherit these descriptors: a lock is held until the last one has ended
        self._children: set[subprocess.Popen[bytes]] = set()
        self._starting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Engine:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        while self._locks:
            os.close(self._locks.pop())

    def _handle(self, number: int, _: Any) -> None:
        first, self.stopping = not self.stopping, self.stopping or number
        for child in self._children:
            _stop(child)
        if first and not self._children and not self._starting:
            raise Stopped

    def take_lock(self, folder: str, name: str = ".lock") -> None:
        """Create *folder*, and lock it for this process and its commands.

        Raises:
            UsageError: another run works in *folder*, or it cannot be written
        """
        try:
            os.makedirs(folder, exist_ok=True)
            self._locks.append(lock.take(os.path.join(folder, name), folder))
        except OSError as error:
            raise UsageError(f"cannot write to {folder} ({error.strerror}): choose another --exp") from error

    async def run(
        self,
        command: Sequence[str],
        log: str,
        watch: Watch,
        environment: Mapping[str, str] | None = None,
        explain: Callable[[str], str] | None = None,
    ) -> None:
        """Run *command* with its output in the file *log*.

        Args:
            watch: reads the output and shows progress
            environment: additional variables of the environment
            explain: returns the reason of a failure from the output; empty if a signal has stopped the command

        Raises:
            Stopped: a signal has stopped the command
            Failed: the command has failed
        """
        if self.stopping:
            raise Stopped
        with open(log, "a", encoding="utf-8") as stream:
            begun = stream.seek(0, os.SEEK_END)
            watch.name = watch.name or " ".join(os.path.basename(word) for word in command[:2] if word[:1] != "-")
            with watch.display:
                status = await self._run(command, stream, watch, environment or {})
            problem = watch.finish(status == 0)
            if status < 0 and not problem:
                problem = f"ended by signal {-status} (out of memory?)"
            elif status > 0 and explain:
                problem = explain(_read(log, begun))
                status = 1 if problem else STOPPED
            if problem:
                stream.write(problem + "\n")
        if status in ENDED or self.stopping:
            raise Stopped
        if status or problem:
            raise Failed(_last_line(log))

    async def _run(
        self, command: Sequence[str], log: IO[str], watch: Watch, environment: Mapping[str, str]
    ) -> int:
        """Run *command*, and return its exit status; negative if a signal ended it."""
        self._starting = True
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **environment}, preexec_fn=_end_with_parent, start_new_session=True,
                pass_fds=self._locks,
            )  # fmt: skip
            self._children.add(child)
        except OSError as problem:
            log.write(f"{command[0]}: {problem.strerror}\n")
            return 127
        finally:
            self._starting = False
        try:
            if self.stopping:  # the signal has arrived while the command started
                _stop(child)
            await _follow(child, log, watch)
        finally:
            while child.poll() is None:
                await asyncio.sleep(0.02)
            self._children.remove(child)
        return child.returncode


async def _follow(child: subprocess.Popen[bytes], log: IO[str], watch: Watch) -> None:
    """Write the output of *child* to *log* and *watch* until it ends, and show progress every second."""
    assert child.stdout is not None
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, child.stdout)
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    rest, due, block = "", time.monotonic() + 1, asyncio.ensure_future(reader.read(BLOCK))
    try:
        while True:
            await asyncio.wait({block}, timeout=max(0, due - time.monotonic()))
            if time.monotonic() >= due:
                watch.tick()
                due = time.monotonic() + 1
            if not block.done():
                continue
            found = block.result()
            *lines, rest = (rest + decoder.decode(found, final=not found)).split("\n")
            for line in [*(line + "\n" for line in lines), *([rest] if rest and not found else [])]:
                log.write(line)
                log.flush()
                watch.read(line)
            if not found:
                return
            block = asyncio.ensure_future(reader.read(BLOCK))
    except BaseException:  # such as a full disk; the command must be able to save and to print
        _stop(child)
        block.cancel()
        await asyncio.wait({block})
        while await reader.read(BLOCK):
            pass
        raise
    finally:
        transport.close()


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process group of *child*."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends for any reason; SLURM's SIGUSR2 is the parent's."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _read(log: str, start: int) -> str:
    with open(log, encoding="utf-8", errors="replace") as stream:
        stream.seek(start)
        return stream.read()


def _last_line(log: str) -> str:
    """Return the last non-empty line of a log."""
    lines = [line for line in _read(log, 0).splitlines() if line.strip()]
    return lines[-1].rstrip()[:300] if lines else "no output"
