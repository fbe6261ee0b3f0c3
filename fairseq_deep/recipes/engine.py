"""The engine of the experiments: runs commands, any number at a time, logs their output, and forwards signals.

All commands run in one event loop. Each has its own process group. The group receives SIGTERM when this process
receives one of ``SIGNALS``; fairseq-train then saves a checkpoint. The command itself also receives it when this
process ends for any other reason, such as ``kill -9``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.files import flock

from .watch import Watch

STOPPED = 75
"""Exit status of a training that has saved a checkpoint after a signal."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDED = {*(-number for number in SIGNALS), 130, 143, STOPPED}
"""Exit statuses of commands that a signal has stopped."""
LONGEST_LINE = 1 << 28
PATIENCE = 30
"""Time limit for another run in the same directory to end, in seconds; ``RECIPE_PATIENCE`` overrides it."""


class Stopped(Exception):
    """A signal from the user has stopped the run; it leaves the engine's context as `KeyboardInterrupt`."""


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

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        while self._locks:
            os.close(self._locks.pop())
        if kind is Stopped:
            raise KeyboardInterrupt from None

    def _handle(self, number: int, _: Any) -> None:
        first, self.stopping = not self.stopping, self.stopping or number
        for child in self._children:
            _stop(child)
        if first and not self._children and not self._starting:
            raise Stopped

    def take_lock(self, folder: str, name: str = ".lock", option: str = "--exp") -> None:
        """Create *folder*, and lock it for this process and its commands.

        Args:
            option: the option that chooses the directory, for messages

        Raises:
            UsageError: another run works in *folder*, or it cannot be written
        """
        try:
            os.makedirs(folder, exist_ok=True)
            self._locks.append(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o666))
            _lock(self._locks[-1], folder, option)
        except OSError as error:
            raise UsageError(f"cannot write to {folder} ({error.strerror}): choose another {option}") from error

    async def run(
        self,
        command: Sequence[str],
        log: str,
        watch: Watch,
        environment: Mapping[str, str] | None = None,
        explain: Callable[[str], str] | None = None,
        accepted: Collection[int] = (0,),
    ) -> None:
        """Run *command* with its output in the file *log*.

        Args:
            watch: reads the output and shows progress
            environment: additional variables of the environment
            explain: returns the reason of a failure from the output; empty if a signal has stopped the command
            accepted: exit statuses of success

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
            problem = watch.finish(status in accepted)
            if status < 0 and not problem:
                problem = f"ended by signal {-status} (out of memory?)"
            elif status > 0 and explain:
                problem = explain(_read(log, begun))
                status = 1 if problem else STOPPED
            if problem:
                stream.write(problem + "\n")
        if status in ENDED or self.stopping:
            raise Stopped
        if status not in accepted or problem:
            raise Failed(_last_line(log))

    async def _run(self, command: Sequence[str], log: IO[str], watch: Watch, environment: Mapping[str, str]) -> int:
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
    """Write the output of *child* to *log* and *watch* until it ends, and show progress at least every second."""
    reader = asyncio.StreamReader(LONGEST_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, child.stdout)
    line = asyncio.ensure_future(reader.readline())
    try:
        while True:
            await asyncio.wait({line}, timeout=1)
            watch.tick()
            if not line.done():
                continue
            text = line.result().decode("utf-8", "replace")
            if not text:
                return
            log.write(text)
            log.flush()
            watch.read(text)
            line = asyncio.ensure_future(reader.readline())
    except BaseException:  # such as a full disk; the command must be able to save and to print
        _stop(child)
        line.cancel()
        await asyncio.wait({line})
        while await reader.read(LONGEST_LINE):
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


def _lock(descriptor: int, folder: str, option: str) -> None:
    """Lock the open file *descriptor* of *folder*, and write to it who holds the lock.

    Raises:
        UsageError: another run works in *folder*
    """
    patience = int(os.environ.get("RECIPE_PATIENCE", PATIENCE))
    for second in range(patience + 1):
        try:
            flock(descriptor)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode().strip() or "another run"
            if second == 0:
                print(f"waiting for {owner}, which still uses {folder}", flush=True)
            time.sleep(1 if patience else 0)
        except OSError:
            return  # locks are not supported
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode(), 0)
            return
    raise UsageError(f"{folder} is in use by {owner}: try again later, or use another {option}")


def _read(log: str, start: int) -> str:
    with open(log, encoding="utf-8", errors="replace") as stream:
        stream.seek(start)
        return stream.read()


def _last_line(log: str) -> str:
    """Return the last non-empty line of a log."""
    lines = [line for line in _read(log, 0).splitlines() if line.strip()]
    return lines[-1].rstrip()[:300] if lines else "no output"
