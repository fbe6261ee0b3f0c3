"""A checkpoint knows the dictionaries that it was trained with, and data of others is refused in one line.

Rows with ``swapped`` in ``tests/errors/trainings.txt`` and ``commands.txt`` have what each command says.
"""

import shutil

import pytest
import torch

from tests.helpers.commands import PACKAGE, losses, refusal, run, saved, train_command

EPOCH = ("--max-epoch", "1", "--no-epoch-checkpoints")


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(*train_command(small, folder, *EPOCH))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def other(small, tmp_path_factory):
    """The data as if two words had changed places in their dictionary."""
    folder = shutil.copytree(small, tmp_path_factory.mktemp("other") / "bin")
    for path in folder.glob("dict.*.txt"):
        first, second, *rest = path.read_text().splitlines(keepends=True)
        path.write_text("".join([second, first, *rest]))
    return folder


def generate(data, checkpoint, *flags, check=False):
    words = ("fairseq-generate", data, "--user-dir", PACKAGE, "--path", checkpoint, "--gen-subset", "valid", "--cpu")
    return run(*words, "--beam", "1", "--num-workers", "0", *flags, check=check)


def assert_refused(done):
    last = refusal(done)
    for part in ("trained with another source dictionary (", "--srcdict", "--allow-other-dictionary"):
        assert part in last, last
    assert "H-0" not in done.stdout


def test_they_are_taken_on_request_and_the_next_checkpoint_has_the_new_ones(small, trained, other, tmp_path):
    flags = ("--restore-file", trained, "--reset-dataloader", "--reset-optimizer", "--allow-other-dictionary")
    assert losses(run(*train_command(other, tmp_path, *EPOCH, *flags)))
    assert "H-0" in generate(other, tmp_path / "checkpoint_last.pt", check=True).stdout
    assert_refused(generate(small, tmp_path / "checkpoint_last.pt"))
    overridden = generate(other, trained, "--model-overrides", "{'allow_other_dictionary': True}", check=True)
    assert "H-0" in overridden.stdout


def test_a_model_of_the_opposite_direction_begins_a_run_that_resumes(small, trained, tmp_path):
    words = train_command(small, tmp_path, "-s", "tgt", "-t", "src", "--finetune-from-model", trained)
    assert losses(run(*words, "--max-update", "1")) and losses(run(*words, "--max-update", "2")).keys() == {2}
    assert "src to tgt" in refusal(generate(small, trained, "-s", "tgt", "-t", "src"))
    assert "tgt to src" in refusal(generate(small, tmp_path / "checkpoint_last.pt"))
    overridden = ("-s", "tgt", "-t", "src", "--model-overrides", "{'allow_other_dictionary': True}")
    assert "H-0" in generate(small, trained, *overridden, check=True).stdout


def test_a_checkpoint_that_names_none_is_taken(trained, other, tmp_path):
    """Of an older version, or of stock fairseq."""
    state = saved(trained.parent)
    assert set(state["task_state"]["dictionaries"]) == {"source", "target"}
    state["task_state"] = {}
    torch.save(state, tmp_path / "old.pt")
    assert "H-0" in generate(other, tmp_path / "old.pt", check=True).stdout


def test_averaged_models_still_know(trained, other, tmp_path):
    inputs = (trained, trained.with_name("checkpoint_best.pt"))
    run("fairseq-deep", "average", "--inputs", *inputs, "--output", tmp_path / "mean.pt")
    assert_refused(generate(other, tmp_path / "mean.pt"))
