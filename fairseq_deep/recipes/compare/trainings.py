"""Execution of a comparison's training runs, some at a time, with progress and time estimates."""

import contextlib
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.display import Display, clock
from fairseq_deep.recipes.options import EXAMPLES, ROOT
from fairseq_deep.recipes.process import Stopped
from fairseq_deep.recipes.record import read_json
from fairseq_deep.recipes.seeds import link_text
from fairseq_deep.runtime.records import RESULT
from fairseq_deep.tools import write_text

MAIN = os.path.join(ROOT, "fairseq_deep", "recipes", "__main__.py")
SCRIPT = os.path.join(EXAMPLES, "compare", "one.sh")
UPDATE = re.compile(r"^  epoch +\d+  update +(\d+) ")
# options that do not change the result of a finished run
IDLE = ("--data", "--data-tar", "--workers", "--force-batch", "--disk-gb", "--ngpu", "--exp")
EVERY = 30  # interval of progress lines, in seconds


def recipe_program(words):
    """Return the command of a recipe with *words*."""
    return [sys.executable, MAIN, "recipe/compare", SCRIPT, "run", *words]


class Run:
    """One system with one seed, in its own directory.

    Attributes:
        begun: start time, or None
        first, last: time and update of the first and last progress line
        limit: total number of updates
    """

    def __init__(self, system, seed, folder, command):
        self.system, self.seed, self.folder, self.command = system, seed, folder, command
        self.begun, self.first, self.last, self.limit = None, None, None, 0
        if "--max-update" in command:
            self.limit = int(command[command.index("--max-update") + 1])

    @property
    def name(self):
        return f"{self.system.label} seed {self.seed}"

    @property
    def failure(self):
        """The file with the reason of a failure."""
        return os.path.join(self.folder, "failure.txt")

    def reason(self):
        """Return the reason of a failure; empty if the run did not fail."""
        if not os.path.exists(self.failure):
            return ""
        with open(self.failure, encoding="utf-8") as stream:
            return stream.read().strip()

    def key(self):
        """Return a hash of the settings that affect the result; runs with other settings are not done."""
        words, kept = iter(self.command), []
        for word in words:
            if word in IDLE:
                next(words)
            else:
                kept.append(word)
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()

    def finished(self):
        """Return the note of :meth:`finish`; empty if the run is not finished with this command."""
        note = read_json(os.path.join(self.folder, "finished.json"))
        whole = os.path.exists(os.path.join(self.folder, "RESULT.json"))
        return note if whole and note.get("key") == self.key() else {}

    def is_done(self):
        return bool(self.finished())

    def has_checkpoint(self):
        return os.path.exists(os.path.join(self.folder, "checkpoints", "checkpoint_last.pt"))

    def diagnose(self, environment):
        """Run ``fairseq-deep diagnose`` on the last checkpoint and the validation data, unless done.

        Returns:
            str: the failure, if any
        """
        output = os.path.join(self.folder, "diagnose.json")
        if not self.system.ours or os.path.exists(output) and not self.begun:
            return ""
        words = ["fairseq-deep", "diagnose", os.path.join(self.folder, "data-bin"), "--split", "valid", "--eval-mode"]
        words += ["--path", os.path.join(self.folder, "checkpoints", "checkpoint_last.pt")]
        words += ["--json", output, "--cpu"]
        if os.path.exists(output):
            os.remove(output)  # results of an older checkpoint
        path = os.path.join(self.folder, "logs", "diagnose.log")
        with open(path, "w") as log:
            status = subprocess.run(words, stdout=log, stderr=log, env=environment).returncode
        return f"{self.name}: diagnose failed, and its columns stay empty: see {path}" if status else ""

    def finish(self, seconds):
        """Record the end, and delete checkpoints that are not required to average or to resume with more updates."""
        folder = os.path.join(self.folder, "checkpoints")
        averages = "--average" in self.command and self.command[self.command.index("--average") + 1] != "1"
        needed = re.compile(r"checkpoint(_last|\d+)\.pt" if averages else r"checkpoint_last\.pt")
        for name in os.listdir(folder):
            if not needed.fullmatch(name):
                os.remove(os.path.join(folder, name))
        note = {"key": self.key(), "seconds": round(seconds, 1)}
        write_text(os.path.join(self.folder, "finished.json"), json.dumps(note) + "\n")


class Trainings:
    """The queue of training runs.

    Args:
        runs: runs in order; finished ones are skipped
        jobs: number of simultaneous runs
        gpus: GPUs per run
        devices: GPUs of the machine
        lock: open file that all runs inherit
        shared: directory with the common text
    """

    def __init__(self, runs, jobs, gpus, devices, lock, shared):
        self.runs, self.jobs, self.lock, self.shared = runs, jobs, lock, shared
        self.failed, self.children, self.stopping, self.told = [], {}, False, []
        self.guard, self.display = threading.Lock(), Display(EVERY)
        ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        ids = [part for part in ids.split(",") if part][:devices]
        self.slots = queue.Queue()
        for slot in range(jobs):
            shares = [ids[(slot * gpus + each) % len(ids)] for each in range(min(gpus, len(ids)))]
            own = shares if gpus else ids
            self.slots.put(",".join(own))

    def work(self):
        """Train the unfinished runs, and return the names of failed runs.

        Raises:
            Stopped: after Ctrl-C or SIGTERM, when all child processes have ended
        """
        todo = [run for run in self.runs if not run.is_done()]
        for run in self.runs:
            if run.is_done():
                self._diagnose(run, os.environ)  # an interruption may have skipped this
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self.display:
                self._work_off(todo)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopping:
            raise Stopped("stopped; to resume, run the same command again")
        return [run.name for run in self.runs if run in self.failed]

    def _work_off(self, todo):
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._train, run) for run in todo}
            while futures:
                done, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                self._look_after_children()
                if not self.stopping and (done or self.display.is_due()):
                    self._show()

    def _stop(self, *_):
        self.stopping = True

    def _look_after_children(self):
        """Reap ended processes, since their children check for this; after a user's signal, terminate the others."""
        with self.guard:
            for child in self.children.values():
                if child.poll() is None and self.stopping and child not in self.told:
                    child.terminate()
                    self.told.append(child)

    def _train(self, run):
        slot = self.slots.get()
        try:
            if not self.stopping:
                self._train_on(run, slot)
        except (OSError, UsageError) as error:  # such as a full disk
            self._fail(run, str(error))
        finally:
            self.slots.put(slot)

    def _fail(self, run, problem):
        """Record a failed run, and terminate its process."""
        with self.guard:
            child = self.children.pop(run, None)
        if child is not None:
            child.terminate()
            child.stdout.close()  # nobody reads it any more
            child.wait()
        self.failed.append(run)
        self.display.remove(run.name)
        self.display.print(f"{run.name}: FAILED: {problem}")
        with contextlib.suppress(OSError):
            write_text(run.failure, f"{problem}\n")

    def _diagnose(self, run, environment):
        failure = run.diagnose(environment)
        if failure and not self.stopping:
            self.display.print(failure)

    def _train_on(self, run, devices):
        link_text(self.shared, run.folder)
        run.begun = time.time()
        if os.path.exists(run.failure):
            os.remove(run.failure)
        again = " (resumed)" if run.has_checkpoint() else ""
        self.display.print(f"{run.name}: started{again}")
        environment = {**os.environ, "RECIPE_OWNER": str(os.getpid())}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with self.guard:
            if self.stopping:
                return
            child = subprocess.Popen(
                recipe_program(run.command),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                encoding="utf-8", errors="replace", env=environment, pass_fds=[self.lock],
            )  # fmt: skip
            self.children[run] = child
        problem = self._follow(run, child.stdout)
        status = child.wait()
        with self.guard:
            del self.children[run]
        self.display.remove(run.name)
        if self.stopping:
            return
        if status:
            self._fail(run, problem or f"exit status {status}")
            return
        self._diagnose(run, environment)
        if self.stopping:
            return
        run.finish(time.time() - run.begun)
        result = read_json(os.path.join(run.folder, "RESULT.json"), RESULT)
        found = f"BLEU {result['bleu']:.2f}" if "bleu" in result else f"valid ppl {result['valid_ppl']:.2f}"
        self.display.print(f"{run.name}: done in {clock(time.time() - run.begun)}, {found}; {self._left()}")

    @staticmethod
    def _follow(run, lines):
        """Log the recipe's output, track updates, and return the last error."""
        problem = None
        with open(os.path.join(run.folder, "recipe.log"), "a", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                found = UPDATE.match(line)
                if found:
                    run.last = time.time(), int(found[1])
                    run.first = run.first or run.last
                if line.startswith("error: "):
                    problem = line.strip()[len("error: ") :].partition("; log: ")[0]
        return problem

    def _show(self):
        with self.guard:
            running = list(self.children)
        places = [(run, run.last[1] if run.last else 0) for run in running]
        words = [f"{run.name} {done:,} of {run.limit:,} updates" for run, done in places]
        count = len(self.runs) - len(self._todo())
        line = f"{self._left()}: {'; '.join(words)}"
        self.display.show("all", count, len(self.runs), "training runs", left=self._seconds(), line=line)
        if self.display.bars is not None:
            for run, done in places:
                self.display.show(run.name, done, run.limit, "updates")

    def _todo(self):
        return [run for run in self.runs if not run.is_done() and run not in self.failed]

    def _seconds(self):
        total = estimate(self.runs, self._todo())
        return None if total is None else total / self.jobs

    def _left(self):
        """Describe the number of unfinished runs and their estimated time."""
        todo, seconds = self._todo(), self._seconds()
        if not todo:
            return "all done"
        guess = "" if seconds is None else f", about {clock(seconds)}"
        return f"left: {len(todo)} of {len(self.runs)} runs{guess}"


def estimate(runs, todo):
    """Estimate the seconds for *todo* from other seeds of the same system, otherwise from the mean of all runs."""
    known, pace = {}, []
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
