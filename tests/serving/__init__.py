"""What the tests of the server share: a stand-in for a model, and a server as a process."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from fairseq_deep.runtime.translator import Translation
from fairseq_deep.serving.batching import Batcher, Pair
from fairseq_deep.serving.messages import Limits
from fairseq_deep.serving.service import Service
from tests.helpers.commands import WITHOUT_FAIRSEQ
from tests.helpers.forkserver import in_fork
from tests.helpers.processes import until

EN, DE = Pair("en", "de"), Pair("de", "en")
GOOD = {"q": "w1", "source": "en", "target": "de"}


class Fake:
    """Stands in for a served model: upper-cases lines once *ready* is set, and fails for the line "fail"."""

    max_source = 40

    def __init__(self, pair=EN):
        self.translator, self.pair, self.batches, self.ready = self, pair, [], threading.Event()
        self.ready.set()

    def describe(self):
        return {}

    def translate_nbest(self, lines, nbest):
        self.ready.wait(60)
        self.batches.append(lines)
        if "fail" in lines:
            raise RuntimeError("failed as asked")
        return [[Translation(f"{line.upper()}{rank or ''}", -rank) for rank in range(nbest)] for line in lines]


def service_of(models, limits=None, capacity=1000):
    batcher = Batcher({model.pair: model.translator for model in models}, capacity=capacity)
    return Service({model.pair: model for model in models}, batcher, limits or Limits())


class ServerProcess:
    """``fairseq-deep serve`` with *words* in a process of its own, which cannot import fairseq."""

    def __init__(self, *words):
        command = in_fork([*map(str, ("fairseq-deep", "serve", *words, "--port", 0, "--cpu"))])
        self.log = Path(tempfile.mkstemp()[1])
        with open(self.log, "w") as stream:
            env = {**os.environ, "PREPARE": json.dumps(WITHOUT_FAIRSEQ)}
            self.process = subprocess.Popen(command, stderr=stream, env=env)
        until(lambda: self.events or self.process.poll() is not None)
        assert self.events[0].get("event") == "ready", self.events
        self.url = self.events[0]["url"]
        self.address = self.url.removeprefix("http://").split(":")

    @property
    def events(self):
        """The entries of its log so far; other lines are {"line": TEXT}."""
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) if line.startswith("{") else {"line": line} for line in lines]

    def stop(self, number):
        """The exit status after a signal; 0 sends none."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)
        self.log.unlink()
