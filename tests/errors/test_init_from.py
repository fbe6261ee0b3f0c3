"""``--init-from`` rejects what does not fit: one line with the file, the problem and the fix."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.dictionaries import sums
from fairseq_deep.plugin.training import restart
from tests.helpers.models import make_dictionary, save_trained, task_of

STOCK = {"encoder_layers": 2, "decoder_layers": 1}
PRE, POST = "prenorm_6l", "postnorm_6l"
BEGINS = "its encoder has post-norm, the new one pre-norm: use an architecture transformer_"
# the old model, its flags, flags of the new model, the message
MODELS = [
    (PRE, {"encoder_embed_dim": 32, "decoder_embed_dim": 32}, {},
     "it has --encoder-embed-dim 32, the new model 16: use --encoder-embed-dim 32"),
    (PRE, {"no_scale_embedding": True}, {}, "its encoder scales embeddings differently: add --no-scale-embedding"),
    (PRE, {"no_token_positional_embeddings": True}, {},
     "its encoder has none positions, the new one sinusoidal: use the flags"),
    (PRE, {"decoder_ffn_embed_dim": 48}, {}, "it has --decoder-ffn-embed-dim 48, the new mod"),
    (POST, {}, {}, BEGINS + "postnorm_*, such as --arch transformer_postnorm_12l"),
    (POST, {}, {"encoder_layers": 20}, BEGINS + "postnorm_*, such as --arch transformer_postnorm_20l"),
    (POST, {}, {"arch": "dlcl_6l"}, BEGINS + "dlcl_postnorm_*, such as --arch transformer_dlcl_postnorm_12l"),
    (POST, {"decoder_normalize_before": True}, {"arch": POST},
     "its decoder has pre-norm, the new one post-norm: add --decoder-normalize-before"),
    (POST, {"encoder_normalize_before": True}, {}, BEGINS.replace("encoder", "decoder")
     + "postnorm_*, such as --arch transformer_postnorm_12l --encoder-normalize-before"),
    (POST, {"deep_init": "rezero"}, {}, "its encoder has no norms, the new one pre-norm: use the"),
    (PRE, {"encoder_layers": 3}, {}, "its encoder has 3 layers, the new one 2: use --encoder-layers 3 or more"),
    (PRE, {"decoder_layers": 0}, {}, "its decoder has no layers to copy"),
    (PRE, {"encoder_learned_pos": True}, {"encoder_learned_pos": True, "max_source_positions": 8},
     "its encoder.embed_positions.weight is (1026, 16), the new model's"),
    (PRE, {}, {"share_all_embeddings": True},
     "its encoder.embed_tokens.weight and decoder.embed_tokens.weight differ, and the new model shares"),
    (POST, {}, {"arch": POST, "deep_init": "admin", "admin_start": "profile"},
     "--admin-start profile requires an untrained model: use another --admin-start"),
    (PRE, {"residual": "mix-ln"}, {"encoder_layers": 4, "residual": "mix-ln"}, "layer 1 of its "
     "encoder has post-norm, its copy in layer 3 pre-norm: use the same --residual, and for Mix-LN "),
    (PRE, {"ffn": "swiglu"}, {"ffn": "geglu"}, "it has --ffn swiglu, the new model geglu: use"),
    ("lstm_6l", {"lstm_attn_residual": False}, {"arch": "lstm_6l", "lstm_attn_residual": True},
     "its decoder has another query of the cross-attention: add --lstm-no-attn-residual"),
    (POST, {}, {"arch": "lstm_two_6l"}, "the layers of --layer-agg residual (decoder) are split"),
]  # fmt: skip


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


@pytest.mark.parametrize("old, theirs, ours, words", MODELS, ids=[words[:70] for *_, words in MODELS])
def test_a_model_that_does_not_fit(old, theirs, ours, words, refused, build, dictionary, tmp_path):
    save_trained(tmp_path / "old.pt", build, dictionary, old, **{**STOCK, **theirs})
    assert refused(tmp_path / "old.pt", **ours).startswith(words)


@pytest.fixture
def state(build, dictionary, tmp_path):
    """A checkpoint, and the file that it is in."""
    save_trained(tmp_path / "old.pt", build, dictionary, PRE, **STOCK)
    return torch.load(tmp_path / "old.pt", weights_only=False)


FILES = [
    *(({"args": setting}, "cannot build a model with its settings")
      for setting in ({"encoder_layers": "x"}, {"layer_agg": "new"}, {"max_source_positions": -1})),
    ({"args": {"arch": "fconv"}}, "unsupported architecture fconv; use"),
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
    trainer = SimpleNamespace(cfg=flags, get_num_updates=lambda: 0, set_num_updates=print, get_lr=lambda: 0.0)
    with pytest.raises(UsageError, match="--stack-restart-updates 10: the schedule's learning rate is 0 there; lower"):
        restart.load_checkpoint(trainer, "checkpoint_last.pt")
