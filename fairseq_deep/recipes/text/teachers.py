"""Translation of shards of text by ``fairseq-deep translate``, in several child processes at once.

A child reads its shard from a pipe and writes to another one, so it ends soon after this process, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import fairseq_deep
from fairseq_deep.errors import UsageError, printable

PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(fairseq_deep.__file__)))


class Shard(NamedTuple):
    """Lines that one child translates."""

    number: int
    sources: list[str]
    references: list[str]


class Teachers:
    """Child processes, each of which translates one shard.

    Args:
        words: arguments of ``translate``
        environments: additional variables of the environment, one dictionary per simultaneous process
    """

    def __init__(self, words: list[str], environments: list[dict[str, str]]):
        self.command = [sys.executable, "-P", "-m", "fairseq_deep", "translate", *words, "--json"]
        path = os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH"))))
        self.environments = [{**os.environ, "PYTHONPATH": path, **more} for more in environments]
        self.lock, self.children, self.ended = threading.Lock(), set(), False

    def work_off(self, shards: Iterator[Shard], finish: Callable[[Shard, list[list[str]]], None]) -> None:
        """Translate *shards*, and call *finish* for each with the hypotheses of its lines; the order is arbitrary.

        Raises:
            UsageError: a child reports an error, or has ended; all others are ended
        """

        def work(environment: dict[str, str]) -> None:
            while shard := self._next(shards):
                finish(shard, self.translate(shard.sources, environment))

        with ThreadPoolExecutor(len(self.environments)) as pool:
            try:
                for future in as_completed([pool.submit(work, each) for each in self.environments]):
                    future.result()
            finally:
                self.end()

    def _next(self, shards: Iterator[Shard]) -> Shard | None:
        with self.lock:
            return None if self.ended else next(shards, None)

    def end(self) -> None:
        """Kill the children, and start no others."""
        with self.lock:
            self.ended = True
            for child in self.children:
                child.kill()

    def translate(self, lines: list[str], environment: dict[str, str]) -> list[list[str]]:
        """Return the hypotheses of each line, the best one first; none for a line that is too long for the teacher.

        Raises:
            UsageError: the child reports an error, or has ended
        """
        with self.lock:
            if self.ended:
                raise UsageError("interrupted")
            child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, encoding="utf-8", errors="replace", env=environment,
                                     process_group=0)  # fmt: skip  # Ctrl-C reaches this process only
            self.children.add(child)
        output, errors = child.communicate("".join(f"{line}\n" for line in lines))
        with self.lock:
            self.children.remove(child)
        last = printable(errors.strip().rpartition("\n")[2].removeprefix("fairseq-deep translate: "), None)
        if child.returncode == 2 and last:
            raise UsageError(last)
        found = output.split("\n")[:-1]
        if child.returncode not in (0, 1) or len(found) != len(lines):  # 1: a line is too long
            reason = f"status {child.returncode}" + (f": {last}" if last else "")
            raise UsageError(f"a translating process has ended ({reason}), perhaps out of memory: run the same command "
                             "again to resume, with fewer --workers")  # fmt: skip
        return [[each["text"] for each in json.loads(line)["translations"]] for line in found]
