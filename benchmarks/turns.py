"""Systems in processes of their own that take turns, and the machine that they run on.

OpenMP's threads wait for work by spinning, and two libraries in one process would slow each other down. Here every
system has a process with the same number of threads, one of them works at a time, and the others block on a pipe.
"""

import contextlib
import logging
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from importlib import metadata

import torch

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.machine import count_cores, describe_cpu

START = "spawn"
"""How workers start; "fork" is faster, for tests."""
PAUSE = 0.3  # seconds until the threads of the system before have stopped spinning
PACKAGES = ("torch", "fairseq", "ctranslate2")


def serve(pipe, make, system, settings):
    """In a worker: build the system, say so, then call one of its methods for each request."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings.threads)
    try:
        worker = make(system, settings)
        pipe.send(("", None))
        for method, arguments in iter(pipe.recv, None):
            start, used = time.perf_counter(), time.process_time()
            found = getattr(worker, method)(*arguments)
            pipe.send(("", (time.perf_counter() - start, time.process_time() - used, found)))
    except (EOFError, KeyboardInterrupt):
        return
    except (SystemExit, UsageError) as error:
        pipe.send((str(error), None))
    except Exception as error:
        traceback.print_exc()
        pipe.send((f"{system}: {type(error).__name__}: {error}", None))


class Turns:
    """A worker for each of *systems*, made by ``make(system, settings)``; a context, at whose end they end.

    Those that cannot be built, or fail, are left out. Progress and failures go to standard error at once: they remain
    if the time is over before the end.

    Attributes:
        problems: the failures, a line each

    Raises:
        SystemExit: no system is left
    """

    def __init__(self, make, systems, settings):
        self.make, self.systems, self.settings = make, systems, settings
        self.workers, self.problems = {}, []

    def __enter__(self):
        os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
        context = multiprocessing.get_context(START)
        try:
            for system in self.systems:  # one after the other: what a system measures as it loads, it measures alone
                pipe, end = context.Pipe()
                arguments = end, self.make, system, self.settings
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                end.close()
                self.workers[system] = (process, pipe)
                self._try(system, self._answer)
            self._check()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for system in [*self.workers]:
            self._end(system)

    def _end(self, system):
        process, pipe = self.workers.pop(system)
        with contextlib.suppress(OSError):  # of one that has failed
            pipe.send(None)
        pipe.close()
        process.join(timeout=10)
        if process.is_alive():
            process.terminate()

    def _try(self, system, function, *arguments):
        """Call *function* with *system*; None if it fails, which ends its worker."""
        try:
            return function(system, *arguments)
        except SystemExit as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            self.problems.append(str(error))
            self._end(system)
            return None

    def _check(self):
        if not self.workers:
            raise SystemExit(self.problems[0])

    def _answer(self, system):
        try:
            problem, content = self.workers[system][1].recv()
        except (EOFError, OSError):
            raise SystemExit(f"{system}: its process ended without a word (too little memory?)") from None
        if problem:
            raise SystemExit(problem)
        return content

    def _ask(self, system, method, *arguments):
        time.sleep(PAUSE)
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended
            self.workers[system][1].send((method, arguments))
        return self._answer(system)

    def ask(self, method, *arguments):
        """{system: (seconds on the clock, those of the processor, result)} of a method of all systems."""
        found = {system: self._try(system, self._ask, method, *arguments) for system in [*self.workers]}
        self._check()
        return {system: turn for system, turn in found.items() if turn}

    def measure(self, method, rounds):
        """{system: [(seconds, CPU seconds, result)]} of *rounds* in which all take turns; one more warms up."""
        found = []
        for number in range(rounds + 1):
            found.append(self.ask(method))
            seconds = ", ".join(f"{system} {turn[0]:.3f} s" for system, turn in found[-1].items())
            print(f"round {number or 'that warms up'}: {seconds}", file=sys.stderr, flush=True)
        return {system: [turns[system] for turns in found[1:]] for system in found[-1]}


def median(turns, clock=0):
    """Median seconds (*clock* 0) or CPU seconds (1) of a system."""
    return statistics.median(turn[clock] for turn in turns)


def speed(base, own, clock=0):
    """Speed relative to the system *base*: the median of the ratios within the rounds."""
    return statistics.median(first[clock] / second[clock] for first, second in zip(base, own))


def describe_machine():
    """What figures depend on, in two lines."""
    model, instructions = describe_cpu()
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    versions.append(f"commit {commit or 'unknown'}")
    state = f"{count_cores()} cores, load {os.getloadavg()[0]:.1f} before"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model} ({' '.join(instructions)}), {state}{gpu}\n{', '.join(versions)}"
