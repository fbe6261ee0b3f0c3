"""Models, limits, metrics and log of a server."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.bundle import Bundle
from fairseq_deep.runtime.files import read_text
from fairseq_deep.runtime.translator import Translator

from .batching import Batcher, Pair
from .languages import name_of
from .messages import Limits

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bounds of the histograms."""


@dataclass(frozen=True)
class ServedModel:
    """A model and its origin."""

    translator: Translator
    bundle: Bundle

    @property
    def pair(self) -> Pair:
        """The model's languages."""
        return Pair(self.translator.source_lang, self.translator.target_lang)

    def describe(self) -> dict[str, Any]:
        """Return the model's properties for the page, without paths of this machine."""
        translator, facts = self.translator, self.translator.facts
        path, name = os.path.abspath(self.bundle.checkpoint), ""
        folder = path if self.bundle.program else os.path.dirname(path)
        if packaged.is_package(path) and not self.bundle.program:
            name = packaged.read_config(packaged.Folder(folder))["name"]
        return {
            "source": self.pair.source,
            "target": self.pair.target,
            "name": name or os.path.basename(folder),
            "architecture": str(facts.arch),
            "layers": f"{facts.layers[0]} + {facts.layers[1]}",
            "parameters": facts.parameters,
            "vocabulary": [len(translator.source), len(translator.target)],
            "beam": translator.options.beam,
            "length_penalty": translator.options.lenpen,
            "device": translator.device.type,
            "engine": translator.engine.name,
            "precision": translator.precision,
        }


class Metrics:
    """Metrics of the server, for ``/metrics``."""

    def __init__(self, batcher: Batcher):
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "fairseq_deep", "registry": self._registry}
        disable_created_metrics()
        self.requests = Counter("requests", "Answered requests.", ("route", "status"), **common)
        self.seconds = Histogram("request_seconds", "Time from a request to its answer.", buckets=SECONDS, **common)
        self.lines = Counter("lines", "Translated lines.", ("source", "target"), **common)
        self.busy = Counter("translation_seconds", "Time spent translating batches.", **common)
        self.batches = Histogram("batch_lines", "Lines per batch.", buckets=LINES, **common)
        Gauge("queue_lines", "Lines in the queue.", **common).set_function(lambda: batcher.waiting)
        Gauge("start_time_seconds", "Unix time of the start.", **common).set_to_current_time()
        batcher.on_batch = self.count_batch

    def count_batch(self, pair: Pair, lines: int, seconds: float) -> None:
        """Count a batch."""
        self.lines.labels(*pair).inc(lines)
        self.busy.inc(seconds)
        self.batches.observe(lines)

    def render(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


def hash_key(key: str) -> bytes:
    """Return the hash of an API key. Keys are compared by hashes, so the time of a comparison tells nothing of them."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def read_keys(path: str) -> frozenset[bytes]:
    """Return the hashes of the keys in a file, one per line.

    Raises:
        UsageError: the file cannot be read, or has no keys
    """
    fix = "give --api-key-file a file with one key per line"
    keys = map(str.strip, read_text(path, fix).removeprefix("\ufeff").splitlines())
    hashes = frozenset(hash_key(key) for key in keys if key)
    if not hashes:
        raise UsageError(f"{path}: has no keys; {fix}")
    return hashes


class Service:
    """The state that the routes use.

    Args:
        models: models by language pair
        batcher: batcher with the models' translators
        limits: limits of a request
        keys: hashes of the accepted API keys; empty: requests need none

    Attributes:
        held: size of all request bodies in memory, in bytes

    Raises:
        UsageError: the queue is smaller than the maximum size of a request
    """

    def __init__(
        self, models: dict[Pair, ServedModel], batcher: Batcher, limits: Limits, keys: Collection[bytes] = frozenset()
    ):
        self.models, self.batcher, self.limits, self.keys = models, batcher, limits, keys
        self.metrics = Metrics(batcher)
        self.held = 0
        self.descriptions = [model.describe() for model in models.values()]
        if batcher.capacity < limits.lines:
            raise UsageError(f"--max-queue {batcher.capacity} is less than --max-lines {limits.lines}; raise it")

    def languages(self) -> list[dict[str, Any]]:
        """Return the answer of ``/languages``; a language without a model that translates from it has no targets."""
        codes = sorted({code for pair in self.models for code in pair})
        targets = {code: sorted(pair.target for pair in self.models if pair.source == code) for code in codes}
        return [{"code": code, "name": name_of(code), "targets": targets[code]} for code in codes]

    def information(self) -> dict[str, Any]:
        """Return the answer of ``/models``."""
        limits = {"characters": self.limits.characters, "lines": self.limits.lines, "seconds": self.limits.timeout}
        return {"models": self.descriptions, "limits": limits, "key_required": bool(self.keys)}


_LOCK = threading.Lock()


def log(event: str, **fields: Any) -> None:
    """Write a JSON line to stderr; errors while writing are ignored."""
    moment = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1000):03d}Z"
    line = json.dumps({"time": stamp, "event": event, **fields}, default=str)
    with _LOCK:
        try:
            print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # a full disk, or a closed stream
            return


class JsonLog(logging.Handler):
    """Log handler that writes uvicorn's messages as JSON lines."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        more = {"error": f"{type(error).__name__}: {one_line(error, 300)}"} if error else {}
        log("server", level=record.levelname.lower(), message=one_line(record.getMessage(), 300), **more)
