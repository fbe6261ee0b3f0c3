"""Counters, gauges and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "fairseq_deep_"


class Counter:
    """A monotonically increasing sum per combination of labels."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()):
        self.name, self.text, self.labels = PREFIX + name, text, labels
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float, *labels: object) -> None:
        """Add *amount*; *labels* has a value for each label."""
        key = tuple(map(str, labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> list[str]:
        """Return the samples."""
        with self._lock:
            values = sorted(self._values.items())
        return [sample(self.name, dict(zip(self.labels, key)), value) for key, value in values]


class Gauge:
    """A value that is read when metrics are rendered."""

    kind = "gauge"

    def __init__(self, name: str, text: str, read: Callable[[], float]):
        self.name, self.text, self.read = PREFIX + name, text, read

    def lines(self) -> list[str]:
        """Return the sample."""
        return [sample(self.name, {}, self.read())]


class Histogram:
    """Cumulative counts of values up to each of *bounds*, with sum and number of values."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text, self.bounds = PREFIX + name, text, bounds
        self._lock = threading.Lock()
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count *value*."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        """Return the samples."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        found, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), counts):
            below += count
            found.append(sample(f"{self.name}_bucket", {"le": bound}, below))
        return [*found, sample(f"{self.name}_sum", {}, total), sample(f"{self.name}_count", {}, below)]


def sample(name: str, labels: dict[str, str], value: float) -> str:
    """Format one line with name, labels and value."""
    escaped = {key: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, text in labels.items()}
    shown = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def render(metrics: Sequence[Counter | Gauge | Histogram]) -> str:
    """Return the metrics in Prometheus' text format."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"
