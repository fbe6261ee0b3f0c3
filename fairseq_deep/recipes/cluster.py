"""``--launcher slurm``: training runs as elements of a SLURM job array, submitted by submitit.

An element trains, translates and scores one run in its directory, which all nodes share. Before its time limit it
saves a checkpoint and is requeued. The command ends after all elements. Started again, it follows elements that are
still queued, and submits missing runs.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.tools.output_files import write_text

from .engine import Engine, Stopped
from .options import ROOT
from .record import read_json, write_json
from .runner import StageFailed
from .trainings import Run, Trainings

SIGNAL_SECONDS = 300
"""Time between the signal to save and the time limit; it must be enough for one validation."""
POLL = 5
"""Seconds between two looks at the queue."""
FRESH = 60
"""Seconds until a shared directory shows the files of another node."""
SET = ("array", "chdir", "error", "export", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "open-mode",
       "output", "requeue", "signal", "time", "wrap")  # fmt: skip
"""Options of sbatch that are set here."""


class Job:
    """A run as a task of submitit."""

    def __init__(self, run: Run, args: Any, text: str):
        self.run, self.args, self.text = run, args, text

    def __call__(self) -> None:
        """Train, translate and score the run; its directory records the result."""
        logging.getLogger("fairseq").setLevel(logging.WARNING)
        if not self.args.ngpu:
            os.environ["OMP_NUM_THREADS"] = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        with Engine() as engine:
            try:
                engine.take_lock(self.run.folder)
                asyncio.run(Trainings(engine, [self.run], self.args, self.text).work())
                return
            except Stopped:
                pass
            except UsageError as error:
                write_text(self.run.failure, f"{error.message}\n")
                return
        if engine.stopping == signal.SIGUSR2:  # the time limit: submitit requeues the job
            signal.raise_signal(signal.SIGUSR2)
        os._exit(130)  # pre-empted or cancelled: without a result, a requeued job starts again

    def checkpoint(self) -> Any:
        """Return the task that resumes the run."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def options_of(text: str) -> dict[str, str]:
    """Parse options of sbatch, such as ``partition=gpu account=lab``.

    Raises:
        UsageError: a word is not of the form NAME=VALUE, is repeated, or is set by this command
    """
    found: dict[str, str] = {}
    for word in shlex.split(text):
        name, equals, value = word.removeprefix("--").partition("=")
        if not re.fullmatch("[a-z][a-z-]*", name) or not equals or not value:
            raise UsageError(f"--slurm: '{word}' is not an option of sbatch: write NAME=VALUE, such as partition=gpu")
        if name in SET:
            other = {"gpus-per-node": "--ngpu", "time": "--slurm-hours", "array": "--jobs"}.get(name)
            raise UsageError(f"--slurm: {name} is set by {other or 'this command'}: omit it")
        if name in found:
            raise UsageError(f"--slurm has {name} twice: remove one")
        found[name] = value
    return found


def check(args: Any) -> None:
    """Reject a machine without SLURM or submitit, and options that SLURM rejects; nothing is submitted."""
    for program in ("sbatch", "squeue"):
        if not shutil.which(program):
            raise UsageError(f"--launcher slurm: {program} is not in PATH: run this on a login node of the cluster")
    if importlib.util.find_spec("submitit") is None:
        raise UsageError(f"--launcher slurm requires submitit: run {sys.executable} -m pip install submitit")
    words = [f"--{name}={value}" for name, value in _parameters(args).items()]
    tested = subprocess.run(["sbatch", "--test-only", *words, "--wrap=true"], capture_output=True, text=True)
    if tested.returncode:
        raise UsageError(f"--launcher slurm: {_words(tested.stderr)}; correct --slurm, --slurm-hours or --ngpu")


def _words(errors: str) -> str:
    """Return the first error of sbatch."""
    lines = [line.split(": ", 1)[-1] for line in errors.splitlines() if "error" in line]
    return lines[0].removeprefix("error: ") if lines else one_line(errors)


def _parameters(args: Any) -> dict[str, Any]:
    """Return the options of sbatch."""
    minutes = round(60 * float(args.slurm_hours))
    if 60 * minutes < 2 * SIGNAL_SECONDS:
        raise UsageError(f"--slurm-hours {args.slurm_hours} is too short to save a checkpoint: give at least 0.2")
    gpus = {"gpus-per-node": args.ngpu} if args.ngpu else {}
    return {"nodes": 1, "ntasks-per-node": 1, "time": minutes, "cpus-per-task": 4 * args.ngpu or 1, **gpus,
            **options_of(args.slurm)}  # fmt: skip


def train(engine: Engine, runs: list[Run], args: Any, text: str) -> list[Run]:
    """Train the unfinished *runs* with the launcher of *args*, and return those that failed.

    Args:
        text: directory with the text of all runs

    Raises:
        StageFailed: a signal has stopped the training
    """
    kind, jobs = Trainings, ""
    if args.launcher == "slurm":
        kind, jobs = Cluster, "; the jobs continue (scancel ends them)"
    try:
        return asyncio.run(kind(engine, runs, args, text).work())
    except Stopped:
        raise StageFailed(f"stopped{jobs}; to resume: {runs[0].plan.again}", 130) from None


class Cluster(Trainings):
    """The queue as a job array of SLURM: one worker submits the runs, and follows them to their end."""

    def slots(self) -> list[str]:
        return [""]

    async def work_off(self, queue: Iterator[Run], devices: str) -> None:
        todo, left = [*queue], queued()
        waiting = {job: run for run in todo if (job := read_json(_record(run)).get("job")) in left}
        for job, run in waiting.items():
            self.display.print(f"{run.name}: job {job} is in the queue")
        waiting |= self._submit([run for run in todo if run not in waiting.values()])
        while waiting:
            left = queued()
            for job in [job for job in waiting if job not in left]:
                await self._report(waiting.pop(job), job)
            if waiting:
                await asyncio.sleep(POLL)

    def _submit(self, runs: list[Run]) -> dict[str, Run]:
        """Submit *runs* as a job array, and return them by job.

        Raises:
            UsageError: SLURM rejects the jobs
        """
        import submitit

        if not runs:
            return {}
        args = copy.copy(self.args)
        args.jobs, parallel = 1, args.jobs if "jobs" in args.given else len(runs)
        executor = submitit.SlurmExecutor(self._folder, max_num_timeout=10**6, python=shlex.quote(sys.executable))
        own = _parameters(args)
        given = {name: own.pop(name) for name in ("time", "nodes", "ntasks-per-node", "cpus-per-task")}
        executor.update_parameters(
            **{name.replace("-", "_"): value for name, value in given.items()}, additional_parameters=own,
            array_parallelism=parallel, signal_delay_s=SIGNAL_SECONDS, job_name="fairseq_deep",
            setup=[f"export PYTHONUTF8=1 PYTHONPATH={shlex.quote(ROOT)}${{PYTHONPATH:+:$PYTHONPATH}}"],
        )  # fmt: skip
        try:
            with executor.batch():
                jobs = [executor.submit(Job(run, args, self.text)) for run in runs]
        except submitit.core.utils.FailedJobError as error:
            raise UsageError(f"--launcher slurm: {_words(str(error))}; correct --slurm") from error
        for job, run in zip(jobs, runs):
            run.forget_failure()
            os.makedirs(run.folder, exist_ok=True)
            write_json(_record(run), {"job": job.job_id})
            self.display.print(f"{run.name}: submitted as job {job.job_id}")
        return {job.job_id: run for job, run in zip(jobs, runs)}

    async def _report(self, run: Run, job: str) -> None:
        """Report the result of a job that has ended."""
        end = time.monotonic() + FRESH
        while not run.is_done() and not run.reason() and time.monotonic() < end:
            os.listdir(run.folder)  # refreshes the cache of a network file system
            await asyncio.sleep(1)
        if run.is_done():
            self.display.print(f"{run.name}: done")
        else:
            self.fail(run, run.reason() or f"job {job} {self._end_of(job)}")

    @property
    def _folder(self) -> str:
        return os.path.join(self.args.exp, "slurm")

    def _end_of(self, job: str) -> str:
        """Describe a job that ended without a result."""
        log = os.path.join(self._folder, f"{job}_0_log.err")
        if not os.path.exists(log):
            return f"ended before it began: put --exp on a disk that all nodes share ({log} does not exist)"
        return f"was cancelled or killed: see {log}"


def _record(run: Run) -> str:
    return os.path.join(run.folder, "job.json")


def queued() -> set[str]:
    """Return the numbers of the user's jobs that are pending, running or requeued."""
    for _ in range(5):
        found = subprocess.run(["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True,
                               text=True)  # fmt: skip
        if found.returncode == 0:
            return set(found.stdout.split())
        time.sleep(POLL)  # the controller may be busy
    raise UsageError(f"squeue: {_words(found.stderr)}; the jobs continue: run the same command again")
