"""The fixtures that all tests share: a vocabulary, narrow models, batches, binarised data."""

import gc
import logging
import os
import random
import shutil

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when torch imports it

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402

from fairseq_deep.plugin.architectures import build_architecture  # noqa: E402

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers.commands import binarise, write_pairs  # noqa: E402
from tests.helpers.models import VOCAB, make_batch, make_dictionary, tiny_flags  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


LEVELS = {logger: logger.level for logger in map(logging.getLogger, ("fairseq", "fairseq_deep"))}


@pytest.fixture(autouse=True)
def log_levels():
    """The tools make loggers quieter, also where fixtures of a whole file call them; no test is to notice."""
    for logger, level in LEVELS.items():
        logger.setLevel(level)


@pytest.fixture(scope="session")
def dictionary():
    return make_dictionary(VOCAB)


@pytest.fixture
def build(dictionary):
    """build(name, dim=16, **flags): a narrow model of the architecture *name* without dropout."""

    def build(name, dim=16, **flags):
        return build_architecture(name, dictionary, **{**tiny_flags(name, dim), **flags})

    return build


@pytest.fixture
def batch(dictionary):
    return make_batch(dictionary)


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def process_group(tmp_path):
    """Data-parallel training of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Binarised pairs: 300 for training, 40 for validation, 30 for testing."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(11)
    for split, count in (("train", 300), ("valid", 40), ("test", 30)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid", "test"))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A few pairs, of which trainings take less than a second: 60 for training, 8 for validation."""
    folder, rng = tmp_path_factory.mktemp("small"), random.Random(1)
    for split, count in (("train", 60), ("valid", 8)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, request):
    """The folder of a recipe, as its stages leave it, with two checkpoints of a small model; one for all workers."""
    from tests.helpers.trained import train_recipe

    own = tmp_path_factory.getbasetemp()
    exp = (own.parent if hasattr(request.config, "workerinput") else own) / "recipe"
    with FileLock(f"{exp}.lock"):
        if not (exp / "RESULT.json").exists():  # which is written last
            shutil.rmtree(exp, ignore_errors=True)
            exp.mkdir()
            train_recipe(exp, "--joined-dictionary")
    return exp


@pytest.fixture
def command(capsys):
    """command(NAME, ...): exit code, output and errors of ``fairseq-deep`` in this process."""
    from fairseq_deep.cli import main

    def command(*words):
        capsys.readouterr()
        return main([*map(str, words)]), *capsys.readouterr()

    return command


@pytest.fixture
def refused(command):
    """refused(NAME, ...): the one line with which ``fairseq-deep`` ends."""

    def refused(name, *words):
        code, out, err = command(name, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        assert err.startswith(f"fairseq-deep {name}: "), err
        return err

    return refused


def pytest_configure():
    """What collection makes stays: looking through it while it grows takes a third of its time."""
    gc.disable()


def pytest_collection_finish():
    """Nor is it looked at again, which takes a twentieth of all."""
    gc.collect()
    gc.freeze()
    gc.enable()
