"""Execution of a plan's stages, with logs and markers of finished stages."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from typing import IO, Any

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.tools import results
from fairseq_deep.tools.input_text import text_of

from . import record
from .display import Display, clock
from .engine import Engine, Failed, Stopped
from .options import quote
from .plan import Plan
from .stages import Markers
from .watch import Watch

NAMES = ("set-up", "data", "text", "binarise", "train", "average", "generate", "score")


class StageFailed(UsageError):
    """A stage has failed or was stopped by a signal.

    Attributes:
        status: exit status of the command
        reason: the reason, without the command that resumes the run
    """

    def __init__(self, message: str, status: int = 1, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Tee:
    """Writes text to several streams; the first is the screen."""

    def __init__(self, *streams: Any) -> None:
        self.streams, self.screen = streams, streams[0]

    def write(self, text: str) -> int:
        """Write to all streams."""
        for stream in self.streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush all streams."""
        for stream in self.streams:
            stream.flush()


Stage = Callable[["Runner"], Awaitable[None]]


class Runner:
    """Runs the stages of one training run.

    Args:
        plan: plan of the run
        engine: runs commands
        out: receives messages; None: standard output
        display: returns a new display of a command's progress
        environment: additional variables of the environment, for all commands

    Attributes:
        dry: whether commands are only printed
        log: log file of the current stage
        current: number of the current stage
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        out: IO[str] | None = None,
        display: Callable[[], Display] = Display,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.plan, self.engine, self.dry = plan, engine, plan.options.dry_run
        self.out, self.display, self.environment = out, display, environment or {}
        self.markers = Markers(plan)
        self.log, self.current = "", 0

    def say(self, text: str) -> None:
        """Print a message."""
        print(text, file=self.out, flush=True)

    async def run_stages(self, functions: list[Stage], first: int, last: int) -> None:
        """Run the stages *first* to *last*, except finished ones.

        Raises:
            UsageError: the input of a stage is invalid
            StageFailed: a stage has failed
        """
        for stage in range(first, last + 1):
            name, begun = NAMES[stage], time.monotonic()
            if not self.dry and self.markers.is_done(stage):
                self.say(f"stage {stage} {name}: already done")
                continue
            self.say(f"stage {stage} {name}")
            if not self.dry:
                self.markers.forget(stage)
                self._forget_result(stage)
            await self.attempt(stage, functions[stage], f"{stage}-{name}.log")
            if not self.dry:
                self.markers.set(stage)
                self.say(f"  done in {clock(time.monotonic() - begun)}")

    def _forget_result(self, stage: int) -> None:
        """Remove the records of an earlier model or translation, also of all seeds; no stage depends on stage 0."""
        for folder in {self.plan.exp, self.plan.home} if stage else ():
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "RESULT.json"))

    async def attempt(self, stage: int, function: Stage, log: str) -> None:
        """Run the function of a stage."""
        self.current, self.log = stage, self.plan.path("logs", log)
        try:
            await function(self)
        except Stopped:
            message = f"stopped in stage {stage} ({NAMES[stage]}); to resume: {self.plan.again}"
            raise StageFailed(message, 130, f"stage {stage} ({NAMES[stage]}) was stopped by a signal") from None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError(of_system(error)) from error
        except Failed as error:
            reason = f"stage {stage} ({NAMES[stage]}) failed: {error}"
            raise StageFailed(
                f"{reason}; log: {quote([self.log])}; fix the problem, then resume: {self.plan.again}",
                reason=reason,
            ) from None

    async def run(
        self,
        *command: Any,
        watch: Watch | None = None,
        explain: Callable[[str], str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Run a command with its output in the log, or print the command in a dry run."""
        words = [str(word) for word in command]
        if self.dry:
            self.say(quote(words))
        else:
            own = {**self.environment, **(environment or {})}
            await self.engine.run(words, self.log, watch or Watch(self.display()), own, explain)

    def call(self, words: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function with its output on the screen and in the log, or print *words* in a dry run."""
        if self.dry:
            self.say(f"# {words}")
            return
        with open(self.log, "a", encoding="utf-8") as log, contextlib.redirect_stdout(Tee(sys.stdout, log)):
            function(*arguments)

    def need(self, path: str) -> None:
        """Raise `UsageError` if an input of the current stage is missing."""
        if not self.dry and not os.path.exists(path):
            raise UsageError(f"stage {self.current} requires {path}: run the earlier stages first (omit --stage)")

    def replace(self, old: str, new: str) -> None:
        """Rename the directory *old* to *new*, which is replaced if it exists."""
        if self.dry:
            self.say(f"# {quote([old])} becomes {quote([new])}")
        else:
            shutil.rmtree(new, ignore_errors=True)
            os.replace(old, new)


def of_system(error: OSError) -> str:
    """Return the message for an error of the operating system."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or one_line(error)}; fix this and run the same command again"


def report_result(runner: Runner) -> dict[str, Any]:
    """Write ``RESULT.json`` of the run and its line of ``results.jsonl``; return the former."""
    plan, options = runner.plan, runner.plan.options
    settings = {name: getattr(options, name) for name in ("task", "conf")}
    # earlier stages may have had other options, and fewer checkpoints than requested
    given, made = [options.average, options.average_updates], text_of(plan.path("averaged.txt")).split()
    settings["averaged"], settings["average_updates"] = [*map(int, made), *given[len(made) :]]
    settings.update(record.read_search(plan.exp, options))
    found = record.collect(plan.exp, plan.subsets, settings)
    record.write_json(plan.path("RESULT.json"), found)
    results.add(plan.home, [{**record.result_line(plan.exp), "folder": os.path.relpath(plan.exp, plan.home)}])
    return found
