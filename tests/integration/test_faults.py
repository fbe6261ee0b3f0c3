"""A small training in which each write to its folder fails in turn: the next start ends as if nothing had been."""

import argparse
import random

import fairseq_cli.train  # noqa: F401 (imported before any fork)
import pytest
import torch
from fairseq import safe_save, utils

from tests import faults
from tests.commands import PACKAGE, binarise, train_command, write_pairs

FLAGS = ("--max-update", "4", "--num-workers", "0", "--keep-last-epochs", "1")
WRITES = range(1, 46)
"""More than there are; a test says so."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Data for two updates an epoch."""
    utils.import_user_module(argparse.Namespace(user_dir=str(PACKAGE)))
    folder, rng = tmp_path_factory.mktemp("small"), random.Random(1)
    for split, count in (("train", 60), ("valid", 8)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid"))


def state(folder):
    """The last checkpoint, without the number that fairseq's positions never set."""
    content = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    for name in [name for name in content["model"] if name.endswith("_float_tensor")]:
        del content["model"][name]
    return content


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """What a training without a fault leaves: its losses, last state, and number of writes."""
    folder = tmp_path_factory.mktemp("whole")
    status, writes = faults.train(train_command(small, folder, *FLAGS), folder / "log", faults.Faults(folder))
    assert status == 0, (folder / "log").read_text()[-2000:]
    return faults.losses(folder / "log"), state(folder), writes


def assert_goes_on(small, folder, whole):
    """The next start, whatever it finds, ends with the losses and the state of *whole*."""
    log = folder.with_name(folder.name + ".again")
    status, _ = faults.train(train_command(small, folder, *FLAGS), log, faults.Faults(folder))
    assert status == 0, log.read_text()[-2000:]
    expected, final, _ = whole
    found = faults.losses(log)
    assert found.items() <= expected.items() and set(found) == set(range(5 - len(found), 5))
    last = state(folder)
    assert all(torch.equal(last["model"][name], value) for name, value in final["model"].items())
    moments, expected = last["last_optimizer_state"]["state"], final["last_optimizer_state"]["state"]
    assert all(torch.equal(moments[key]["exp_avg_sq"], expected[key]["exp_avg_sq"]) for key in expected)
    return log.read_text()


def test_the_writes_are_counted(whole):
    losses, _, writes = whole
    assert set(losses) == {1, 2, 3, 4} and 30 < writes < max(WRITES)


@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("at", WRITES)
def test_a_write_that_fails_loses_nothing(small, whole, tmp_path, kind, at):
    if at > whole[2]:
        return
    folder = tmp_path / "save"
    folder.mkdir()
    log = tmp_path / "log"
    status, _ = faults.train(train_command(small, folder, *FLAGS), log, faults.Faults(folder, kind, at))
    text = log.read_text()
    if kind == "kill":
        assert status == faults.KILLED
    elif status:
        assert "saved" in text.splitlines()[-1] and "Traceback" not in text, text[-2000:]
    left = [path for path in folder.glob("*.pt") if not safe_save.is_whole(path)]
    assert left == [], "every checkpoint is whole"
    assert_goes_on(small, folder, whole)
