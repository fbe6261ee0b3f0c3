"""Random models in this process, a client of the application that serves them, and a server as a process."""

import random
import signal

import pytest
import torch

from fairseq_deep.cli import main
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.serving.service import ServedModel
from tests.helpers.exports import write_model
from tests.helpers.models import make_dictionary
from tests.serving import DE, EN, ServerProcess, service_of

SIZES = {"max_source_positions": 40, "max_target_positions": 10, "decoder_layers": 2}


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Random models for both directions, whose units are the words w0, w1, ...; translations differ."""
    made, units = [], make_dictionary(200)
    for seed, pair in enumerate((EN, DE), 1):
        folder = tmp_path_factory.mktemp("package")
        torch.manual_seed(seed)
        write_model(folder, "prenorm_2l2l_tiny", (units, units), languages=pair, **SIZES)
        words = ["--tokenizer", "none", "--name", f"random {'-'.join(pair)}", "--output", str(folder / "made")]
        assert main(["package", str(folder / "model.pt"), *words]) == 0
        made.append(folder / "made")
    return made


@pytest.fixture(scope="session")
def lines():
    """300 different lines of one to eight words."""
    rng = random.Random(5)
    drawn = ([rng.randrange(196) for _ in range(rng.randint(1, 8))] for _ in range(600))
    return list(dict.fromkeys(" ".join(f"w{word}" for word in words) for words in drawn))[:300]


@pytest.fixture(scope="session")
def models(packages):
    """The models in double precision: batches do not change their choices."""
    found = []
    for path in map(str, packages):
        translator = Translator(path, cpu=True, beam=3, nbest=3, max_len_a=0.5, max_len_b=3, limit_each=True)
        for model in translator.models:
            model.double()
        found.append(ServedModel(translator, find_bundle(path)))
    return found


@pytest.fixture(scope="session")
def client(models):
    from starlette.testclient import TestClient

    from fairseq_deep.serving.app import make_app

    with TestClient(make_app(service_of(models))) as client:
        yield client


@pytest.fixture(scope="session")
def expected(models, lines):
    """Lines, and their hypotheses by pair."""
    return lines, {model.pair: [[each.text for each in found] for found in model.translator.translate_nbest(lines)]
                   for model in models}  # fmt: skip


@pytest.fixture(scope="session")
def served(packages):
    with ServerProcess(*packages, "--max-characters", 300) as server:
        yield server
        assert server.stop(signal.SIGINT) == 0
