"""Which of several ways to multiply by a weight is the fastest on this machine: measured for few rows and for many."""

import time
from collections.abc import Callable
from typing import Any

FEW = 24  # rows of an input, below which the way for few is taken
MEASURED = (8, 128)  # rows that the way for few and that for many are measured with
PART = 2048  # of more outputs, so many are measured
MARGIN = 0.9  # a later way must take less than so much of the time: noise is not to choose
ROUNDS = 7


def least_times(ways: dict[str, Callable], *inputs: Any, rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each of *ways* for *inputs*: the least of several rounds in turns, after one that does not count."""
    times = {name: float("inf") for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(*inputs)
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def fastest(ways: dict[str, Callable], *inputs: Any) -> str:
    """The name of the first of *ways* that none is clearly faster than."""
    times = least_times(ways, *inputs)
    best = next(iter(times))
    for name in times:
        if times[name] < MARGIN * times[best]:
            best = name
    return best
