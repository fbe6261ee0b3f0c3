"""A checkpoint knows the dictionaries that it was trained with, and data of others is refused in one line."""

import random

import pytest
import torch

from tests.helpers.commands import PACKAGE, binarise, losses, refusal, run, saved, train_command, write_pairs

EPOCH = ("--max-epoch", "1", "--no-epoch-checkpoints")


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(*train_command(small, folder, *EPOCH))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def other(small, tmp_path_factory):
    """Data with as many words, two of which have changed places; and with a few more (fairseq fills up to 8)."""
    folders = []
    for name, change in (("places", {"4": "7", "7": "4"}), ("more", {"4": "a b c d"})):
        folder, rng = tmp_path_factory.mktemp(name), random.Random(1)
        for split, count in (("train", 60), ("valid", 8)):
            write_pairs(folder / split, count, rng)
            for path in folder.glob(f"{split}.*"):
                words = [[change.get(word, word) for word in line.split()] for line in path.read_text().splitlines()]
                path.write_text("".join(" ".join(line) + "\n" for line in words))
        folders.append(binarise(folder, ("train", "valid")))
    sizes = [len((folder / "dict.src.txt").read_text().splitlines()) for folder in (small, *folders)]
    assert sizes[0] == sizes[1] < sizes[2]
    return folders


def generate(data, checkpoint, *flags, check=False):
    words = ("fairseq-generate", data, "--user-dir", PACKAGE, "--path", checkpoint, "--gen-subset", "valid", "--cpu")
    return run(*words, "--beam", "1", "--num-workers", "0", *flags, check=check)


def assert_refused(done):
    last = refusal(done)
    for part in ("trained with another source dictionary (", "--srcdict", "--allow-other-dictionary"):
        assert part in last, last
    assert "H-0" not in done.stdout


@pytest.mark.parametrize("which", [0, 1], ids=["other places", "more words"])
def test_other_dictionaries_are_refused(trained, other, tmp_path, which):
    done = run(*train_command(other[which], tmp_path, *EPOCH, "--restore-file", trained), check=False)
    assert_refused(done)
    assert not list(tmp_path.glob("*.pt"))
    assert_refused(generate(other[which], trained))


def test_they_are_taken_on_request_and_the_next_checkpoint_has_the_new_ones(small, trained, other, tmp_path):
    flags = ("--restore-file", trained, "--reset-dataloader", "--reset-optimizer", "--allow-other-dictionary")
    assert losses(run(*train_command(other[0], tmp_path, *EPOCH, *flags)))
    assert "H-0" in generate(other[0], tmp_path / "checkpoint_last.pt", check=True).stdout
    assert_refused(generate(small, tmp_path / "checkpoint_last.pt"))
    overridden = generate(other[0], trained, "--model-overrides", "{'allow_other_dictionary': True}", check=True)
    assert "H-0" in overridden.stdout


def test_a_checkpoint_that_names_none_is_taken(trained, other, tmp_path):
    """Of an older version, or of stock fairseq."""
    state = saved(trained.parent)
    assert set(state["task_state"]["dictionaries"]) == {"source", "target"}
    state["task_state"] = {}
    torch.save(state, tmp_path / "old.pt")
    assert "H-0" in generate(other[0], tmp_path / "old.pt", check=True).stdout


def test_averaged_models_still_know(trained, other, tmp_path):
    inputs = (trained, trained.with_name("checkpoint_best.pt"))
    run("fairseq-deep", "average", "--inputs", *inputs, "--output", tmp_path / "mean.pt")
    assert_refused(generate(other[0], tmp_path / "mean.pt"))


@pytest.mark.parametrize("name", ["translate", "package"])
def test_our_commands_check_them_as_well(trained, other, tmp_path, command, name):
    words = [trained, "--data", other[0], "--tokenizer", "none", "--source-lang", "src", "--target-lang", "tgt"]
    status, _, said = command(name, *words, "--output", tmp_path / "out")
    assert status == 2 and "trained with another source dictionary" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
