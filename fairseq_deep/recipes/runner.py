"""Execution of a plan's stages, with logs and markers of finished stages."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.tools import results

from . import record
from .display import clock
from .options import quote
from .plan import Plan
from .process import Failed, Plain, Stopped, Supervisor
from .stages import Markers, read_marker

NAMES = ("set-up", "data", "text", "binarise", "train", "average", "generate", "score")


class StageFailed(Exception):
    """A stage has failed or was stopped by a signal; *status* is the exit status of the driver."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class Tee:
    """Writes text to several streams; the first is the screen."""

    def __init__(self, *streams: Any):
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


class Runner:
    """Runs the stages and their commands.

    Args:
        plan: plan of one training run
        supervisor: runs commands

    Attributes:
        dry: whether commands are only printed
        log: log file of the current stage
        current: number of the current stage
        every: interval of progress lines, in seconds
        peers: earlier failures of other machines
    """

    def __init__(self, plan: Plan, supervisor: Supervisor):
        self.plan, self.supervisor, self.dry = plan, supervisor, plan.options.dry_run
        self.markers = Markers(plan)
        self.log, self.current, self.every, self.peers = "", 0, 10.0, {}

    def run_stages(self, functions: list[Callable[[Runner], None]], first: int, last: int) -> None:
        """Run the stages *first* to *last*, except finished ones.

        Raises:
            UsageError: the input of a stage is invalid
            StageFailed: a stage has failed
        """
        for stage in range(first, last + 1):
            name, begun = NAMES[stage], time.monotonic()
            if not self.dry and self.markers.is_done(stage):
                print(f"stage {stage} {name}: already done", flush=True)
                continue
            print(f"stage {stage} {name}", flush=True)
            if not self.dry:
                self.markers.forget(stage)
                self._forget_result(stage)
            self.attempt(stage, functions[stage], f"{stage}-{name}.log")
            if not self.dry:
                self.markers.set(stage)
                print(f"  done in {clock(time.monotonic() - begun)}", flush=True)

    def _forget_result(self, stage: int) -> None:
        """Remove the records of an earlier model or translation, also of all seeds; no stage depends on stage 0."""
        for folder in {self.plan.exp, self.plan.home} if stage else ():
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "RESULT.json"))

    def attempt(self, stage: int, function: Callable[[Runner], None], log: str) -> None:
        """Run the function of a stage, and report a failure to the other machines."""
        self.current, self.log = stage, self.plan.path("logs", log)
        try:
            function(self)
        except Stopped:
            raise StageFailed(
                f"stopped in stage {stage} ({NAMES[stage]}); to resume: {self.resume_words()}", 130
            ) from None
        except BrokenPipeError:
            raise
        except (UsageError, OSError) as error:
            self._tell(f"stage {stage} ({NAMES[stage]}) rejected its input")
            if isinstance(error, OSError):
                raise UsageError(of_system(error)) from error
            raise
        except Failed as error:
            self._tell(str(error))
            raise StageFailed(
                f"error: stage {stage} ({NAMES[stage]}) failed: {error}; log: {quote([self.log])}; fix the problem, "
                f"then resume: {self.resume_words()}"
            ) from None

    def _tell(self, words: str) -> None:
        with contextlib.suppress(OSError):
            self.plan.place.tell_peers(self.plan.path("logs"), words)

    def resume_words(self) -> str:
        """Return the command that resumes the run."""
        rank = ["--node-rank", self.plan.place.rank] if "node_rank" in self.plan.options.given else []
        return quote([os.path.join(self.plan.home, "resume.sh"), *rank])

    def run(self, *command: Any, watch: Plain | None = None, launch: Any = None) -> None:
        """Run a command with its output in the log, or print the command in a dry run."""
        words = [str(word) for word in command]
        if self.dry:
            print(quote(words))
        else:
            self.supervisor.run(words, self.log, watch or Plain(self.every), launch)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Also write output printed in this context to the log."""
        with open(self.log, "a", encoding="utf-8") as stream, contextlib.redirect_stdout(Tee(sys.stdout, stream)):
            yield

    def call(self, words: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function with its output on the screen and in the log, or print *words* in a dry run."""
        if self.dry:
            print(f"# {words}")
        else:
            with self.shown():
                function(*arguments)

    def need(self, path: str) -> None:
        """Raise `UsageError` if an input of the current stage is missing."""
        if not self.dry and not os.path.exists(path):
            raise UsageError(f"stage {self.current} requires {path}: run the earlier stages first (omit --stage)")

    def replace(self, old: str, new: str) -> None:
        """Rename the directory *old* to *new*, which is replaced if it exists."""
        if self.dry:
            print(f"# {quote([old])} becomes {quote([new])}")
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
    settings = {name: getattr(options, name) for name in ("task", "conf", "smoke")}
    # earlier stages may have had other options, and fewer checkpoints than requested
    given, made = [options.average, options.average_updates], read_marker(plan.path("averaged.txt")).split()
    settings["averaged"], settings["average_updates"] = [*map(int, made), *given[len(made) :]]
    settings.update(record.read_search(plan.exp, options))
    found = record.collect(plan.exp, plan.subsets, settings)
    record.write_json(plan.path("RESULT.json"), found)
    results.add(plan.home, [{**record.result_line(plan.exp), "folder": os.path.relpath(plan.exp, plan.home)}])
    return found
