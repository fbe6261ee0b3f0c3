"""For tests of the server: a random model as a package, stand-ins for models, and a server as a process."""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.model import untrained
from fairseq_deep.runtime.translator import Translation
from fairseq_deep.serving.batching import Batcher, Pair
from fairseq_deep.serving.messages import Limits
from fairseq_deep.serving.service import Service
from tests.helpers.models import PRENORM, make_dictionary, tiny_flags
from tests.helpers.paths import ALONE

EN, DE = Pair("en", "de"), Pair("de", "en")
GOOD = {"q": "w1", "source": "en", "target": "de"}
ENTRIES = 200
POSITIONS = 40


def write_package(folder, source="en", target="de", seed=1, ends=None, **settings):
    """Write a package of a random model, whose units are the words w0, w1, ..., and return its folder.

    Its translations differ from sentence to sentence.

    Args:
        ends: adds to the score of end-of-sentence, so lengths differ, and <pad> has no probability; None: as it comes
        settings: flags of the model
    """
    folder.mkdir()
    data = folder.parent / f"{folder.name}.data"
    data.mkdir()
    for lang in (source, target):
        make_dictionary(ENTRIES).save(str(data / f"dict.{lang}.txt"))
    flags = argparse.Namespace(arch=PRENORM, **{**tiny_flags(PRENORM, dim=32), **settings})
    flags.max_source_positions = flags.max_target_positions = POSITIONS
    ARCH_CONFIG_REGISTRY[PRENORM](flags)
    torch.manual_seed(seed)
    entries = Dictionary.load(str(data / f"dict.{source}.txt"))
    model = untrained(flags, entries, entries).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)  # its translations are less alike
        if ends is not None:
            model.decoder.layer_norm.bias[0] = 5.0
            rows = model.decoder.output_projection.weight
            rows[Dictionary.eos].mul_(1.5)
            rows[:, 0] = 0.0
            rows[Dictionary.eos, 0] = ends
            rows[Dictionary.pad, 0] = -10.0
    tensors, tied = packaged.make_tensors(model, model.state_dict(), None)
    task = {"source_lang": source, "target_lang": target, "left_pad_source": True, "left_pad_target": False,
            "truncate_source": False, "max_source_positions": POSITIONS, "max_target_positions": POSITIONS}  # fmt: skip
    search = {"beam": 3, "lenpen": 0.6, "max_len_a": 0.0, "max_len_b": 8, "gnmt_lenpen": False}
    config = packaged.make_config(
        f"random {source}-{target}", "none", flags, tied, task=task, search=search,
        text={"tokenizer": "none", "lowercase": False, "sub_words": None}, criterion={"label_smoothing": 0.1},
        made_with={"torch": torch.__version__},
    )  # fmt: skip
    texts = {path.name: path.read_bytes() for path in data.iterdir()}
    packaged.write(os.fspath(folder), packaged.Content(config, tensors, {**texts, "README.md": b"card\n"}))
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
    """``fairseq-deep serve`` in a process of its own, with *words*; its log is in :attr:`events`."""

    def __init__(self, *words, head=10.0):
        command = [sys.executable, ALONE, "serve", head, *words, "--port", 0, "--cpu"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=env)
        self.events = []
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._started.wait(60), self.events
        assert self.events[0].get("event") == "ready", self.events
        self.url = self.events[0]["url"]
        self.address = self.url.removeprefix("http://").split(":")

    def _read(self):
        for line in self.process.stderr:
            self.events.append(json.loads(line) if line.startswith("{") else {"line": line})
            self._started.set()
        self._started.set()

    def stop(self, number):
        """The exit status after a signal; 0 sends none."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def http(fields, path="/translate"):
    """A request as bytes; the server closes the connection after it."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def parsed(answer):
    """Status and fields of an answer in bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
