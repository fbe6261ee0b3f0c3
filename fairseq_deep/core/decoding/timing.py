"""Timing of alternative implementations on this machine."""

import time
from collections.abc import Callable
from typing import Any


def least_times(ways: dict[str, Callable], *inputs: Any, rounds: int) -> dict[str, float]:
    """Return the seconds of each of *ways* for *inputs*: the minimum over alternating rounds, after a warm-up round."""
    times = {name: float("inf") for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(*inputs)
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times
