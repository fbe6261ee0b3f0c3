"""A small training in which each write to its folder fails in turn: the next start ends as if nothing had been."""

import hashlib
import json

import pytest
import torch
from fairseq import safe_save

from tests.helpers import faults
from tests.helpers.commands import losses, train_command

FLAGS = ("--max-epoch", "2", "--num-workers", "0", "--keep-last-epochs", "1")
WRITES = 38
"""How many there are; a test says so."""


def state(folder):
    """The last checkpoint, without the number that fairseq's positions never set."""
    content = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    for name in [name for name in content["model"] if name.endswith("_float_tensor")]:
        del content["model"][name]
    return content


@pytest.fixture(scope="module")
def gone_on():
    """What was found by starts that went on well."""
    return set()


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A training that ends: its losses and last state; and the folders, logs and statuses of its faults, by case."""
    home = tmp_path_factory.mktemp("faults")
    folder, cases, log, ended = (home / name for name in ("save", "cases", "log", "ended.json"))
    folder.mkdir()
    cases.mkdir()
    install = ("install", str(folder), str(cases), str(ended))
    status = faults.train(train_command(small, folder, *FLAGS), log, install)
    assert status == 0, log.read_text()[-2000:]
    return losses(log.read_text()), state(folder), cases, json.loads(ended.read_text())


def found(folder):
    """What a next start finds: the files, and a sum over all that is in each checkpoint but times."""
    files = []
    for path in sorted(folder.glob("*")):
        parts = []
        if path.suffix == ".pt":
            content = torch.load(path, weights_only=False)
            moments = content["last_optimizer_state"]["state"].values()
            tensors = [value for name, value in content["model"].items() if not name.endswith("_float_tensor")]
            tensors += [moment[name] for moment in moments for name in ("exp_avg", "exp_avg_sq")]
            parts = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]
            parts += [content["optimizer_history"], content["extra_state"]["train_iterator"]]
        files.append((path.name, str(parts)))
    return str(files)


def assert_goes_on(small, folder, whole):
    """The next start, whatever it finds, ends with the losses and the state of *whole*."""
    log = folder.with_name(folder.name + ".again")
    status = faults.train(train_command(small, folder, *FLAGS), log)
    assert status == 0, log.read_text()[-2000:]
    expected, final, *_ = whole
    found = losses(log.read_text())
    assert found.items() <= expected.items() and set(found) == set(
        range(len(expected) + 1 - len(found), len(expected) + 1)
    )
    last = state(folder)
    assert all(torch.equal(last["model"][name], value) for name, value in final["model"].items())
    moments, expected = last["last_optimizer_state"]["state"], final["last_optimizer_state"]["state"]
    assert all(torch.equal(moments[key]["exp_avg_sq"], expected[key]["exp_avg_sq"]) for key in expected)
    return log.read_text()


def test_the_writes_are_counted(whole):
    """And old checkpoints were removed, which is one of them."""
    losses, final, _, ended = whole
    assert set(ended) == {f"{kind}.{at}" for kind in faults.KINDS for at in range(1, WRITES + 1)}
    assert final["extra_state"]["train_iterator"]["epoch"] == 3 and len(losses) >= 4


@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_write_that_fails_loses_nothing(small, whole, gone_on, kind):
    """Whichever it is; of folders that hold the same, one is enough to start from."""
    *_, cases, ended = whole
    for at in range(1, WRITES + 1):
        case = f"{kind}.{at}"
        folder, status, text = cases / case, ended[case], (cases / f"{case}.log").read_text()
        if kind == "kill":
            assert status == faults.KILLED, case
        elif status:
            last = text.splitlines()[-1]
            assert status == 1 and "cannot" in last and "save" in last and "Traceback" not in text, (case, text[-2000:])
        else:  # the last thing that was to be done was to remove an old checkpoint, or room was not needed any more
            assert "checkpoint1.pt cannot be removed: " in text or kind == "ENOSPC", (case, text[-2000:])
        left = [path for path in folder.glob("*.pt") if not safe_save.is_whole(path)]
        assert left == [], (case, "every checkpoint is whole")
        begins_with = found(folder)
        if begins_with not in gone_on:
            assert_goes_on(small, folder, whole)
            gone_on.add(begins_with)
