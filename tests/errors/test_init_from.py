"""``--init-from`` rejects what does not fit: one line with the file, the problem and the fix."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.dictionaries import sums
from fairseq_deep.plugin.training import restart
from tests.errors import assert_says, read_model, rows
from tests.helpers.models import make_dictionary, save_trained, task_of

STOCK = {"encoder_layers": 2, "decoder_layers": 1}
PRE = "prenorm_6l"


@pytest.fixture
def refused(build):
    """refused(path, arch, **flags): the message after the name of the file, without a line break."""

    def message(path, arch=PRE, **flags):
        with pytest.raises(UsageError) as error:
            build(f"transformer_{arch}", init_from=str(path), **{**STOCK, **flags})
        text = str(error.value)
        assert text.startswith(f"--init-from {path}: ") and "\n" not in text
        return text.removeprefix(f"--init-from {path}: ")

    return message


@pytest.mark.parametrize("before, models, said", rows("init_from"))
def test_a_model_that_does_not_fit(before, models, said, refused, build, dictionary, tmp_path):
    (old, theirs), (new, ours) = map(read_model, models.split("|"))
    save_trained(tmp_path / "old.pt", build, dictionary, old, **{**STOCK, **theirs})
    assert_says(refused(tmp_path / "old.pt", new, **ours), said)


@pytest.fixture
def state(build, dictionary, tmp_path):
    """A checkpoint, and the file that it is in."""
    save_trained(tmp_path / "old.pt", build, dictionary, PRE, **STOCK)
    return torch.load(tmp_path / "old.pt", weights_only=False)


FILES = [
    *(({"args": setting}, "cannot build a model with its settings")
      for setting in ({"encoder_layers": "x"}, {"layer_agg": "new"}, {"max_source_positions": -1})),
    ({"args": {"arch": "fconv"}}, "cannot build a model with its settings ("),
    ({"model": None}, "not a fairseq"),
    ({"weights": {"encoder.embed_tokens.weight": torch.zeros(39, 16)}},
     "its vocabulary has 39 entries (source), the data's 40: binarise"),
]  # fmt: skip


@pytest.mark.parametrize("change, words", FILES, ids=str)
def test_a_file_of_another_kind(change, words, state, refused, tmp_path):
    vars(state["args"]).update(change.get("args", {}))
    state["model"].update(change.get("weights", {}))
    torch.save({**state, **{key: None for key in change if key == "model"}}, tmp_path / "old.pt")
    assert refused(tmp_path / "old.pt").startswith(words)
    (tmp_path / "old.pt").write_text("no checkpoint")
    assert refused(tmp_path / "old.pt").startswith("cannot load it ")


@pytest.mark.parametrize("stored", [True, False], ids=["in the checkpoint", "next to it"])
def test_another_dictionary_of_the_same_size(stored, state, refused, build, dictionary, tmp_path, caplog):
    """The hashes are in the checkpoint, or the files are next to it; its data are not opened."""
    state = {"model": state["model"], "cfg": {"model": state["args"], "task": {"data": str(tmp_path / "data")}}}
    state["cfg"]["task"].update(source_lang="src", target_lang="tgt")
    path, other = tmp_path / "old.pt", make_dictionary(len(dictionary), prefix="v")

    def store(target):
        if stored:
            state["task_state"] = {"dictionaries": sums(task_of(dictionary, target))}
        for language, words in () if stored else (("src", dictionary), ("tgt", target)):
            words.save(str(tmp_path / f"dict.{language}.txt"))
        torch.save(state, path)

    store(dictionary)
    with caplog.at_level("INFO"):
        build(f"transformer_{PRE}", init_from=str(path), **STOCK)
    assert "not copied: none" in caplog.text and "dictionaries" not in caplog.text
    store(other)
    assert refused(path).startswith("it was trained with another target dictionary (40 entries, sum ")
    build(f"transformer_{PRE}", init_from=str(path), allow_other_dictionary=True, **STOCK)


def test_a_schedule_that_has_ended(monkeypatch):
    monkeypatch.setattr(restart, "_stock", lambda *_: None)
    flags = SimpleNamespace(model=argparse.Namespace(stack_restart_updates=10))
    task = SimpleNamespace(state=None)
    trainer = SimpleNamespace(task=task, cfg=flags, get_num_updates=int, set_num_updates=print, get_lr=float)
    with pytest.raises(UsageError, match="--stack-restart-updates 10: the schedule's learning rate is 0 there; lower"):
        restart.load_checkpoint(trainer, "checkpoint_last.pt")
