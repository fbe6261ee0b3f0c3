"""How long each of several ways to multiply takes on this machine."""

import time
from collections.abc import Callable
from typing import Any


def least_times(ways: dict[str, Callable], *inputs: Any, rounds: int) -> dict[str, float]:
    """Seconds of each of *ways* for *inputs*: the least of several rounds in turns, after one that does not count."""
    times = {name: float("inf") for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(*inputs)
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times
