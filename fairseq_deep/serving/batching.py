"""The request queue of all models, and the thread that translates requests in batches."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq_deep.runtime.translator import Translation, Translator

LOOKAHEAD = 1024
"""Maximum number of queued requests that the batcher searches for lines of similar length."""
LONGEST_RETRY = 60
"""Maximum of the retry delay that a client is given, in seconds."""


class Pair(NamedTuple):
    """The codes of a source and a target language."""

    source: str
    target: str


class QueueFull(Exception):
    """The queue has no room for a request; *retry* is the estimated number of seconds until it has."""

    def __init__(self, retry: int):
        super().__init__(f"the queue is full; try again in {retry} s")
        self.retry = retry


class Closed(Exception):
    """The batcher accepts no more requests."""


@dataclass(frozen=True)
class Job:
    """The lines of one request.

    Attributes:
        pair: languages
        lines: lines of text
        nbest: hypotheses per line
        answer: future of the hypotheses of each line
        arrived: time of arrival on the monotonic clock
    """

    pair: Pair
    lines: Sequence[str]
    nbest: int
    answer: Future[list[list[Translation]]] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        """Number of characters in the longest line."""
        return max(map(len, self.lines))


class Batcher:
    """Combines requests into batches and translates them in one thread.

    A batch contains the oldest request and requests of the same language pair with the most similar line lengths. The
    translator sorts the lines and splits them again by its own limits (sentences and tokens).

    Args:
        translators: the translator of each language pair
        window: maximum delay of the oldest request to collect others, in seconds
        batch_size: maximum number of lines in a batch of several requests
        capacity: maximum number of lines in the queue

    Attributes:
        on_batch: called in the thread after each batch, with language pair, number of lines and seconds
    """

    def __init__(
        self,
        translators: dict[Pair, Translator],
        window: float = 0.01,
        batch_size: int = 64,
        capacity: int = 1000,
    ):
        self.translators, self.window, self.batch_size, self.capacity = translators, window, batch_size, capacity
        self.on_batch: Callable[[Pair, int, float], Any] = lambda pair, lines, seconds: None
        self.waiting = 0  # lines in the queue
        self._pace = 10.0  # lines per second, a moving average
        self._jobs: dict[Future, Job] = {}  # in order of arrival
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="translate", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting requests, and return when all accepted requests are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, pair: Pair, lines: Sequence[str], nbest: int = 1) -> Future[list[list[Translation]]]:
        """Add a request; cancelling the future removes the request from the queue.

        Returns:
            a future of the hypotheses of each line, at most *nbest*, best first; empty for a line with too many tokens

        Raises:
            QueueFull: the queue has no room for the lines
            Closed: :meth:`close` was called
        """
        job = Job(pair, lines, nbest)
        with self._changed:
            if self._closed:
                raise Closed("the server is stopping")
            if self.waiting + len(lines) > self.capacity:
                raise QueueFull(min(LONGEST_RETRY, math.ceil((self.waiting + 1) / self._pace)))
            self._jobs[job.answer] = job
            self.waiting += len(lines)
            self._changed.notify()
        job.answer.add_done_callback(self._forget)
        return job.answer

    def _forget(self, answer: Future) -> None:
        """Remove a cancelled request from the queue."""
        with self._changed:
            job = self._jobs.pop(answer, None)
            self.waiting -= len(job.lines) if job else 0

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            begun, lines = time.monotonic(), sum(len(job.lines) for job in batch)
            if lines:
                self._translate(batch)
                seconds = time.monotonic() - begun
                self._pace += 0.2 * (lines / max(seconds, 1e-6) - self._pace)
                self.on_batch(batch[0].pair, lines, seconds)

    def _next_batch(self) -> list[Job] | None:
        """Return requests to translate that were not cancelled; None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            rest = next(iter(self._jobs.values())).arrived + self.window - time.monotonic()
            if rest > 0:
                self._changed.wait_for(lambda: self._closed or self.waiting >= self.batch_size, rest)
            chosen = self._choose() if self._jobs else []
            for job in chosen:
                del self._jobs[job.answer]
                self.waiting -= len(job.lines)
        return [job for job in chosen if job.answer.set_running_or_notify_cancel()]

    def _choose(self) -> list[Job]:
        oldest, *others = itertools.islice(self._jobs.values(), LOOKAHEAD)
        same = (job for job in others if job.pair == oldest.pair)
        near = heapq.nsmallest(self.batch_size - 1, same, key=lambda job: abs(job.length - oldest.length))
        chosen, count = [oldest], len(oldest.lines)
        for job in near:
            if count + len(job.lines) <= self.batch_size:
                chosen.append(job)
                count += len(job.lines)
        return chosen

    def _translate(self, jobs: list[Job]) -> None:
        """Answer *jobs*; if the batch fails, translate each job separately, so only the failing one gets the error."""
        translator = self.translators[jobs[0].pair]
        lines, nbest = [line for job in jobs for line in job.lines], max(job.nbest for job in jobs)
        try:
            found = iter(translator.translate_nbest(lines, nbest))
        except Exception as error:  # such as insufficient memory: the server must continue
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
            for job in jobs if len(jobs) > 1 else ():
                self._translate([job])
            return
        for job in jobs:
            job.answer.set_result([hypotheses[: job.nbest] for hypotheses in itertools.islice(found, len(job.lines))])
