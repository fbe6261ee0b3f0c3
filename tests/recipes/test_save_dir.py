"""Checkpoints in --save-dir as an older fairseq, a disk or a user may leave them: what the next start does."""

import os
import resource
import shutil

import pytest
from fairseq import safe_save

from tests.helpers.commands import losses, run, train_command


def start(small, folder, *flags, prepare=None):
    """Exit status and log of a training of two epochs."""
    flags = ("--max-epoch", "2", "--max-tokens", "150", *flags)
    done = run(*train_command(small, folder, *flags), check=False, prepare=prepare)
    return done.returncode, done.text


@pytest.fixture(scope="module")
def first_epoch(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torn") / "save"
    assert start(small, folder, "--max-epoch", "1")[0] == 0
    return folder


@pytest.fixture
def stopped(first_epoch, tmp_path):
    return shutil.copytree(first_epoch, tmp_path / "save")


@pytest.fixture(scope="module")
def second_epoch(small, first_epoch, tmp_path_factory):
    """Losses of a next start from an undamaged folder."""
    folder = shutil.copytree(first_epoch, tmp_path_factory.mktemp("whole") / "save")
    return losses(start(small, folder)[1])


@pytest.mark.parametrize("damage", ["torn", "empty", "missing"])
def test_the_newest_whole_one_is_taken(small, second_epoch, stopped, damage):
    last = stopped / "checkpoint_last.pt"
    if damage == "missing":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[: 20_000 if damage == "torn" else 0])
    (stopped / "checkpoint_best.pt").unlink()
    status, text = start(small, stopped)
    assert status == 0 and f"resuming from {stopped / 'checkpoint1.pt'}" in text, text[-1500:]
    assert losses(text) == second_epoch and min(second_epoch) > 1


def test_a_full_disk_ends_in_one_line_and_the_next_start_loses_nothing(small, second_epoch, stopped):
    full = ["resource:setrlimit", resource.RLIMIT_FSIZE, [20_000, 20_000]]
    status, text = start(small, stopped, prepare=full)
    last = text.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in text and losses(text) == second_epoch
    assert ".pt: cannot be saved (File too large); earlier checkpoints are complete: check the disk and run " in last
    status, text = start(small, stopped)
    assert status == 0 and losses(text) == second_epoch


def test_without_a_whole_one_it_is_one_line_and_nothing_is_trained(small, stopped):
    for path in stopped.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:20_000])
    status, text = start(small, stopped)
    assert status == 1 and "Traceback" not in text and losses(text) == {}
    assert "checkpoint_last.pt: truncated, without a complete checkpoint next to" in text.strip().splitlines()[-1]


def test_where_none_is_written_none_is_missing(stopped, tmp_path):
    last = stopped / "checkpoint_last.pt"
    last.unlink()
    for path, no_last in ((last, True), (tmp_path / "new/checkpoint_last.pt", False)):
        assert safe_save.to_restore(str(path), no_last) == str(path)


def test_newest_by_time_of_writing_with_the_same_suffix(tmp_path):
    names = ["checkpoint_2_30.pt", "checkpoint3.pt", "checkpoint1-shard0.pt", "checkpoint.best_1.pt"]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    for suffix, found in (("", ["checkpoint_2_30.pt", "checkpoint3.pt"]), ("-shard0", ["checkpoint1-shard0.pt"])):
        paths = safe_save.numbered(str(tmp_path / f"checkpoint_last{suffix}.pt"))
        assert [os.path.basename(path) for path in paths] == found
