"""For tests of the server: a random model as a package, stand-ins for models, and a server as a process."""

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import torch

from fairseq_deep.cli import main
from fairseq_deep.runtime.translator import Translation
from fairseq_deep.serving.batching import Batcher, Pair
from fairseq_deep.serving.messages import Limits
from fairseq_deep.serving.service import Service
from tests.helpers.commands import WITHOUT_FAIRSEQ
from tests.helpers.exports import write_model
from tests.helpers.forkserver import in_fork
from tests.helpers.models import make_dictionary

EN, DE = Pair("en", "de"), Pair("de", "en")
GOOD = {"q": "w1", "source": "en", "target": "de"}
ENTRIES = 200
POSITIONS = 40


def write_package(folder, source="en", target="de", seed=1):
    """Package a random model, whose units are the words w0, w1, ..., and return the package's folder.

    Its translations differ from sentence to sentence.
    """
    parts = folder.parent / f"{folder.name}.data"
    parts.mkdir()
    torch.manual_seed(seed)
    units = make_dictionary(ENTRIES)
    sizes = {"max_source_positions": POSITIONS, "max_target_positions": 10, "decoder_layers": 2}
    write_model(parts, "prenorm_2l2l_tiny", (units, units), languages=(source, target), **sizes)
    words = ["--tokenizer", "none", "--name", f"random {source}-{target}", "--output", str(folder)]
    assert main(["package", str(parts / "model.pt"), *words]) == 0
    return folder


def random_lines(count, seed=5):
    """Different lines of one to eight words."""
    rng = random.Random(seed)
    drawn = ([rng.randrange(ENTRIES - 4) for _ in range(rng.randint(1, 8))] for _ in range(2 * count))
    return list(dict.fromkeys(" ".join(f"w{word}" for word in words) for words in drawn))[:count]


class Fake:
    """Stands in for a translator: upper-cases lines once *ready* is set, and fails for the line "fail"."""

    max_source = 40

    def __init__(self):
        self.batches, self.ready = [], threading.Event()
        self.ready.set()

    def translate_nbest(self, lines, nbest):
        self.ready.wait(60)
        self.batches.append(lines)
        if "fail" in lines:
            raise RuntimeError("failed as asked")
        return [[Translation(f"{line.upper()}{rank or ''}", -rank) for rank in range(nbest)] for line in lines]


@dataclass
class FakeModel:
    """Stands in for a served model."""

    translator: Fake
    pair: Pair

    def describe(self):
        return {"source": self.pair.source, "target": self.pair.target}


def service_of(models, limits=None, **options):
    options = {"capacity": 1000, **options}
    batcher = Batcher({model.pair: model.translator for model in models}, **options)
    return Service({model.pair: model for model in models}, batcher, limits or Limits())


def ask(client, q, source="en", target="de", **more):
    answer = client.post("/translate", json={"q": q, "source": source, "target": target, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


class ServerProcess:
    """``fairseq-deep serve`` with *words* in a process of its own, which cannot import fairseq."""

    def __init__(self, *words):
        command = in_fork([*map(str, ("fairseq-deep", "serve", *words, "--port", 0, "--cpu"))])
        self.log = Path(tempfile.mkstemp()[1])
        with open(self.log, "w") as stream:
            env = {**os.environ, "PREPARE": json.dumps(WITHOUT_FAIRSEQ)}
            self.process = subprocess.Popen(command, stderr=stream, env=env)
        while not self.events and self.process.poll() is None:
            time.sleep(0.05)
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


def post(url, line):
    """The translation of *line* by the server at *url*."""
    body, headers = json.dumps({**GOOD, "q": line}).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/translate", body, headers), timeout=60) as answer:
        return json.load(answer)["translatedText"]
