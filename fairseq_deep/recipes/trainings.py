"""The queue of training runs: some at a time, each on its share of the devices, with progress and time estimates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import IO, TYPE_CHECKING

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import text_of
from fairseq_deep.tools.output_files import write_text

from .display import Display, clock
from .engine import Engine, Failed, Stopped
from .plan import Plan, count_gpus
from .runner import Runner, StageFailed, of_system, report_result
from .seeds import link_text
from .stages import Markers
from .steps import STAGES
from .watch import TRAIN

if TYPE_CHECKING:
    from .compare.systems import System
    from .recipe import Shared

EVERY = 30  # interval of progress lines, in seconds


class Run:
    """One system with one seed, in its own directory.

    Args:
        system: the system; None: a recipe with this seed

    Attributes:
        share, said: finished share of its training, while it is trained, and its description
    """

    def __init__(self, system: System | None, seed: int, plan: Plan):
        self.system, self.seed, self.plan, self.folder = system, seed, plan, plan.exp
        self.share, self.said = 0.0, "has begun"

    @property
    def name(self) -> str:
        return f"{self.system.label} seed {self.seed}" if self.system else f"seed {self.seed}"

    @property
    def failure(self) -> str:
        """The file with the reason of a failure."""
        return os.path.join(self.folder, "failure.txt")

    def reason(self) -> str:
        """Return the reason of a failure; empty if the run did not fail."""
        return text_of(self.failure).strip()

    def forget_failure(self) -> None:
        """Remove the reason of an earlier failure."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.failure)

    def is_done(self) -> bool:
        """Return whether the run is finished with these settings."""
        last, result = self.plan.options.stop_stage, os.path.join(self.folder, "RESULT.json")
        return Markers(self.plan).is_done(last) and (last < 7 or os.path.exists(result))

    def prune(self) -> None:
        """Delete checkpoints that are not required to average or to resume with more updates."""
        folder = os.path.join(self.folder, "checkpoints")
        needed = re.compile(r"checkpoint(_last|\d+)\.pt" if self.plan.options.average > 1 else r"checkpoint_last\.pt")
        for name in os.listdir(folder):
            if not needed.fullmatch(name):
                os.remove(os.path.join(folder, name))


def runs_of(plan: Plan, system: System | None = None) -> list[Run]:
    """Return the runs of a plan with several seeds."""
    return [Run(system, seed, plan.of_seed(seed)) for seed in plan.seed_list]


class Progress(Display):
    """Display of one run, which stores its progress; lines go to the stream *log*."""

    def __init__(self, run: Run, log: IO[str]):
        super().__init__(out=log)
        self.run = run

    def show(self, name: str, done: float = 0, total: float | None = None, unit: str = "", note: str = "") -> None:
        """Store the progress of training, and write a line if one is due."""
        if name == TRAIN and total:
            self.run.share, self.run.said = done / total, f"{done:,.9g} of {total:,.9g} {unit}"
        super().show(name, done, total, unit, note)


class Trainings:
    """The queue of training runs.

    Args:
        engine: runs the commands
        runs: runs in order; finished ones are skipped
        args: options: number of simultaneous runs, and GPUs per run
        text: directory with the text of all runs

    Attributes:
        failed, running: runs that failed, and runs of which progress is shown
    """

    def __init__(self, engine: Engine, runs: list[Run], args: Shared, text: str):
        self.engine, self.runs, self.args, self.text = engine, runs, args, text
        self.failed: list[Run] = []
        self.running: list[Run] = []
        self.display = Display(EVERY)

    def slots(self) -> list[str]:
        """Return the devices of each worker."""
        return devices_of(self.args.jobs, self.args.ngpu, self.args.ngpu and count_gpus())

    async def work(self) -> list[Run]:
        """Train the unfinished runs, and return those that failed.

        Raises:
            Stopped: after a signal, when all commands have ended
        """
        with self.display:
            queue = iter(self._todo())
            workers = {asyncio.create_task(self.work_off(queue, devices)) for devices in self.slots()}
            while workers:
                ended, workers = await asyncio.wait(workers, timeout=0.5)
                for worker in ended:
                    worker.result()
                if (self.display.is_due() or not workers) and not self.engine.stopping:
                    self._show()
        if self.engine.stopping:
            raise Stopped
        return [run for run in self.runs if run in self.failed]

    async def work_off(self, queue: Iterator[Run], devices: str) -> None:
        """Train runs of the queue on *devices*, one after the other."""
        environment = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        for run in queue:
            if self.engine.stopping:
                return
            self.running.append(run)
            try:
                await self._train(run, environment)
            except StageFailed as end:
                if end.status == 1 or not self.engine.stopping:  # also if a signal reached only this training
                    self.fail(run, end.reason)
            except UsageError as error:
                self.fail(run, error.message)
            except OSError as error:  # such as a full disk
                self.fail(run, of_system(error))
            finally:
                self.running.remove(run)
                self.display.remove(run.name)

    async def _train(self, run: Run, environment: dict[str, str]) -> None:
        """Train, translate, score and diagnose one run."""
        link_text(self.text, run.folder)
        run.forget_failure()
        resumes = os.path.exists(os.path.join(run.folder, "checkpoints", "checkpoint_last.pt"))
        self.display.print(f"{run.name}: started{' (resumed)' * resumes}")
        begun, first, last = time.time(), max(run.plan.options.stage, 4), run.plan.options.stop_stage
        with open(os.path.join(run.folder, "recipe.log"), "a", encoding="utf-8") as log:
            runner = Runner(run.plan, self.engine, log, lambda: Progress(run, log), environment)
            await runner.run_stages(STAGES, first, last)
            if run.system and run.system.ours:
                await runner.attempt(7, partial(self._diagnose, run), "diagnose.log")
            if run.system:
                run.prune()
            result = report_result(runner) if last == 7 else {}
        scores = {"bleu": "BLEU", "valid_ppl": "valid ppl"}
        found = "".join([f", {words} {result[name]:.2f}" for name, words in scores.items() if name in result][:1])
        self.display.print(f"{run.name}: done in {clock(time.time() - begun)}{found}; {self._left()}")

    def fail(self, run: Run, problem: str) -> None:
        """Record a run that failed."""
        self.failed.append(run)
        self.display.print(f"{run.name}: FAILED: {problem}")
        with contextlib.suppress(OSError):
            write_text(run.failure, f"{problem}\n")

    async def _diagnose(self, run: Run, runner: Runner) -> None:
        """Run ``fairseq-deep diagnose`` on the last checkpoint."""
        output = os.path.join(run.folder, "diagnose.json")
        for path in (output, runner.log):  # of an older checkpoint
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        try:
            await runner.run(
                "fairseq-deep", "diagnose", os.path.join(run.folder, "data-bin"), "--split", "valid", "--eval-mode",
                "--path", os.path.join(run.folder, "checkpoints", "checkpoint_last.pt"), "--json", output, "--cpu",
            )  # fmt: skip
        except Failed:
            self.display.print(f"{run.name}: diagnose failed, and its columns stay empty: see {runner.log}")

    def _show(self) -> None:
        """Show the progress of all runs together and, on a terminal, of each."""
        words, total = [f"{run.name} {run.said}" for run in self.running], len(self.runs)
        done = total - len(self._todo()) + sum(run.share for run in self.running)
        self.display.show("all", round(done, 2), total, "runs", "; ".join([self._left(), *words]))
        if self.display.drawn:
            for run in self.running:
                self.display.show(run.name, round(100 * run.share), 100, "%", run.said)

    def _todo(self) -> list[Run]:
        return [run for run in self.runs if not run.is_done() and run not in self.failed]

    def _left(self) -> str:
        """Describe the number of unfinished runs."""
        count = len(self._todo())
        return f"{count} of {len(self.runs)} runs left" if count else "all done"


def devices_of(jobs: int, gpus: int, devices: int) -> list[str]:
    """Return ``CUDA_VISIBLE_DEVICES`` of each of *jobs* simultaneous runs with *gpus* of the machine's *devices*."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    ids = [part for part in ids.split(",") if part][:devices]
    count = min(gpus, len(ids))
    return [",".join(ids[(slot * gpus + each) % len(ids)] for each in range(count)) if gpus else ",".join(ids)
            for slot in range(jobs)]  # fmt: skip
