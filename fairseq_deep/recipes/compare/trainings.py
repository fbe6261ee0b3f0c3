"""Execution of a comparison's training runs, some at a time, with progress and time estimates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from typing import IO, Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display, clock
from fairseq_deep.recipes.engine import Engine, Failed, Stopped
from fairseq_deep.recipes.plan import Plan
from fairseq_deep.recipes.record import read_json
from fairseq_deep.recipes.runner import Runner, StageFailed, of_system, report_result
from fairseq_deep.recipes.seeds import link_text
from fairseq_deep.recipes.stages import Markers
from fairseq_deep.recipes.steps import STAGES
from fairseq_deep.recipes.watch import Watch
from fairseq_deep.runtime.records import RESULT
from fairseq_deep.tools.output_files import write_text

from .systems import System

EVERY = 30  # interval of progress lines, in seconds


class Run:
    """One system with one seed, in its own directory.

    Attributes:
        begun: start time, or None
        first, last: time and update of the first and last progress line
        limit: total number of updates
    """

    def __init__(self, system: System, seed: int, plan: Plan):
        self.system, self.seed, self.plan, self.folder = system, seed, plan, plan.exp
        self.limit = int(plan.train_value("--max-update", "0"))
        self.begun: float | None = None
        self.first: tuple[float, int] | None = None
        self.last: tuple[float, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.system.label} seed {self.seed}"

    @property
    def failure(self) -> str:
        """The file with the reason of a failure."""
        return os.path.join(self.folder, "failure.txt")

    def reason(self) -> str:
        """Return the reason of a failure; empty if the run did not fail."""
        if not os.path.exists(self.failure):
            return ""
        with open(self.failure, encoding="utf-8") as stream:
            return stream.read().strip()

    def finished(self) -> dict[str, Any]:
        """Return the record of :meth:`finish`; empty if the run is not finished with these settings."""
        whole = os.path.exists(os.path.join(self.folder, "RESULT.json")) and Markers(self.plan).is_done(7)
        return read_json(os.path.join(self.folder, "finished.json")) if whole else {}

    def is_done(self) -> bool:
        """Return whether the run is finished with these settings."""
        return bool(self.finished())

    def has_checkpoint(self) -> bool:
        """Return whether training resumes from a checkpoint."""
        return os.path.exists(os.path.join(self.folder, "checkpoints", "checkpoint_last.pt"))

    def diagnosis(self) -> list[str]:
        """Return the command of ``fairseq-deep diagnose`` on the last checkpoint; empty if it is done or impossible."""
        output = os.path.join(self.folder, "diagnose.json")
        if not self.system.ours or os.path.exists(output) and not self.begun:
            return []
        words = ["fairseq-deep", "diagnose", os.path.join(self.folder, "data-bin"), "--split", "valid", "--eval-mode"]
        words += ["--path", os.path.join(self.folder, "checkpoints", "checkpoint_last.pt")]
        return [*words, "--json", output, "--cpu"]

    def finish(self, seconds: float) -> None:
        """Record the end, and delete checkpoints that are not required to average or to resume with more updates."""
        folder = os.path.join(self.folder, "checkpoints")
        needed = re.compile(r"checkpoint(_last|\d+)\.pt" if self.plan.options.average > 1 else r"checkpoint_last\.pt")
        for name in os.listdir(folder):
            if not needed.fullmatch(name):
                os.remove(os.path.join(folder, name))
        write_text(os.path.join(self.folder, "finished.json"), json.dumps({"seconds": round(seconds, 1)}) + "\n")


class Progress(Display):
    """Display of one run: its lines go to the stream *log*, if any, and the run stores its number of updates."""

    def __init__(self, run: Run, log: IO[str] | None):
        super().__init__()
        self.bars, self.run, self.log = None, run, log

    def show(self, name: str, done: float = 0, total: float | None = None, unit: str = "", note: str = "",
             left: float | None = None, line: str = "") -> None:  # fmt: skip
        """Store the number of updates, and write a line if one is due."""
        if unit == "updates":
            self.run.last = time.time(), int(done)
            self.run.first = self.run.first or self.run.last
        if self.is_due():
            self.due = time.time() + self.every
            self.print(f"  {line or f'{name}: {done:,} {unit} {note}'.rstrip()}")

    def print(self, text: str) -> None:
        """Write a line."""
        if self.log:
            print(text, file=self.log, flush=True)


class Trainings:
    """The queue of training runs.

    Args:
        engine: runs the commands
        runs: runs in order; finished ones are skipped
        args: options of the comparison: directory, number of simultaneous runs, GPUs per run and of the machine
    """

    def __init__(self, engine: Engine, runs: list[Run], args: Any):
        self.engine, self.runs, self.shared = engine, runs, os.path.join(args.exp, "shared")
        self.failed: list[Run] = []
        self.running: list[Run] = []
        self.display = Display(EVERY)
        self.slots = devices_of(args.jobs, args.ngpu, args.devices)

    async def work(self) -> list[str]:
        """Train the unfinished runs, and return the names of failed runs.

        Raises:
            Stopped: after a signal, when all commands have ended
        """
        todo = [run for run in self.runs if not run.is_done()]
        for run in self.runs:
            if run.is_done():
                await self._diagnose(run, {})  # an interruption may have skipped this
        with self.display:
            queue = iter(todo)
            workers = {asyncio.create_task(self._work_off(queue, devices)) for devices in self.slots}
            while workers:
                ended, workers = await asyncio.wait(workers, timeout=0.5)
                for worker in ended:
                    worker.result()
                if self.display.is_due() and not self.engine.stopping:
                    self._show()
        if self.engine.stopping:
            raise Stopped
        return [run.name for run in self.runs if run in self.failed]

    async def _work_off(self, queue: Iterator[Run], devices: str) -> None:
        """Train runs of the queue on *devices*, one after the other."""
        environment = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        for run in queue:
            if self.engine.stopping:
                return
            self.running.append(run)
            try:
                await self._train(run, environment)
            except StageFailed as end:
                if end.status == 1:
                    self._fail(run, end.reason)
            except UsageError as error:
                self._fail(run, error.message)
            except OSError as error:  # such as a full disk
                self._fail(run, of_system(error))
            finally:
                self.running.remove(run)
                self.display.remove(run.name)
                if not self.engine.stopping:
                    self._show()

    async def _train(self, run: Run, environment: dict[str, str]) -> None:
        """Train, translate, score and diagnose one run."""
        link_text(self.shared, run.folder)
        run.begun = time.time()
        with contextlib.suppress(FileNotFoundError):
            os.remove(run.failure)
        again = " (resumed)" if run.has_checkpoint() else ""
        self.display.print(f"{run.name}: started{again}")
        with open(os.path.join(run.folder, "recipe.log"), "a", encoding="utf-8") as log:
            progress = Progress(run, log)
            runner = Runner(run.plan, self.engine, log, lambda: progress, environment)
            await runner.run_stages(STAGES, 4, 7)
            report_result(runner)
        await self._diagnose(run, environment)
        if self.engine.stopping:
            return
        run.finish(time.time() - run.begun)
        result = read_json(os.path.join(run.folder, "RESULT.json"), RESULT)
        found = f"BLEU {result['bleu']:.2f}" if "bleu" in result else f"valid ppl {result['valid_ppl']:.2f}"
        self.display.print(f"{run.name}: done in {clock(time.time() - run.begun)}, {found}; {self._left()}")

    def _fail(self, run: Run, problem: str) -> None:
        self.failed.append(run)
        self.display.print(f"{run.name}: FAILED: {problem}")
        with contextlib.suppress(OSError):
            write_text(run.failure, f"{problem}\n")

    async def _diagnose(self, run: Run, environment: dict[str, str]) -> None:
        """Run ``fairseq-deep diagnose``, unless it is done."""
        command = run.diagnosis()
        if not command:
            return
        log = os.path.join(run.folder, "logs", "diagnose.log")
        for path in (log, os.path.join(run.folder, "diagnose.json")):  # of an older checkpoint
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        try:
            await self.engine.run(command, log, Watch(Progress(run, None)), environment)
        except Failed:
            self.display.print(f"{run.name}: diagnose failed, and its columns stay empty: see {log}")
        except Stopped:
            pass

    def _show(self) -> None:
        places = [(run, run.last[1] if run.last else 0) for run in self.running]
        words = [f"{run.name} {done:,} of {run.limit:,} updates" for run, done in places]
        count = len(self.runs) - len(self._todo())
        line = f"{self._left()}: {'; '.join(words)}"
        self.display.show("all", count, len(self.runs), "training runs", left=self._seconds(), line=line)
        if self.display.bars is not None:
            for run, done in places:
                self.display.show(run.name, done, run.limit, "updates")

    def _todo(self) -> list[Run]:
        return [run for run in self.runs if not run.is_done() and run not in self.failed]

    def _seconds(self) -> float | None:
        total = estimate(self.runs, self._todo())
        return None if total is None else total / len(self.slots)

    def _left(self) -> str:
        """Describe the number of unfinished runs and their estimated time."""
        todo, seconds = self._todo(), self._seconds()
        if not todo:
            return "all done"
        guess = "" if seconds is None else f", about {clock(seconds)}"
        return f"left: {len(todo)} of {len(self.runs)} runs{guess}"


def devices_of(jobs: int, gpus: int, devices: int) -> list[str]:
    """Return ``CUDA_VISIBLE_DEVICES`` of each of *jobs* simultaneous runs with *gpus* of the machine's *devices*."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    ids = [part for part in ids.split(",") if part][:devices]
    count = min(gpus, len(ids))
    return [",".join(ids[(slot * gpus + each) % len(ids)] for each in range(count)) if gpus else ",".join(ids)
            for slot in range(jobs)]  # fmt: skip


def estimate(runs: list[Run], todo: list[Run]) -> float | None:
    """Estimate the seconds for *todo* from other seeds of the same system, otherwise from the mean of all runs."""
    known: dict[str, list[float]] = {}
    pace: list[float] = []
    for run in runs:
        seconds = run.finished().get("seconds")
        if seconds is None and run.first and run.last[1] > run.first[1]:
            seconds = run.limit * (run.last[0] - run.first[0]) / (run.last[1] - run.first[1])
        if seconds is not None:
            known.setdefault(run.system.label, []).append(seconds)
            pace.append(seconds)
    if not pace:
        return None
    total = 0.0
    for run in todo:
        guesses = known.get(run.system.label, pace)
        guess, spent = sum(guesses) / len(guesses), time.time() - run.begun if run.begun else 0.0
        total += max(guess - spent, guess / 20)  # a run beyond its estimate is not finished yet
    return total
