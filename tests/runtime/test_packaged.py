"""Packaged models come back to the last bit."""

import argparse
import os

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from safetensors.torch import load_file

from fairseq_deep.cli import main
from fairseq_deep.core.checkpoints import upgrade_layers
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.runtime import packaged
from tests.helpers.methods import DLCL
from tests.helpers.models import VOCAB, task_of, tiny_flags
from tests.helpers.tools import EMPTY

PLAIN = {**{f"{side}_{key}": value for side in ("encoder", "decoder")
            for key, value in (("layers", 1), ("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", 2))},
         "dropout": 0.0}  # fmt: skip


def of_each_family():
    """The shallowest architecture of each family, with flags that make it narrow and, if it is deep, shallow."""
    rows = sorted(ARCHITECTURES.values(), key=lambda row: -row.encoder_layers - row.decoder_layers)
    first = {row.family: row for row in rows}
    shallow = {"encoder_layers": 3, "decoder_layers": 3}
    return {row.name: {**tiny_flags(row.name), **(shallow if row.encoder_layers > 6 else {})} for row in first.values()}


MODELS = {
    **of_each_family(),
    "transformer_lstm_share_all_6l": tiny_flags("transformer_lstm_share_all_6l"),
    "deep_transformer": {**PLAIN, "share_decoder_input_output_embed": True},
    "transformer_iwslt_de_en": {**PLAIN, "share_all_embeddings": True},  # fairseq's own
    "dlcl_transformer_toy": {"dropout": 0.0, "share_all_embeddings": True, "init_value": "one"},  # of the original code
}


@pytest.fixture(scope="module")
def data(dictionary, tmp_path_factory):
    """A folder with both dictionaries."""
    folder = tmp_path_factory.mktemp("dictionaries")
    for lang in ("src", "tgt"):
        dictionary.save(str(folder / f"dict.{lang}.txt"))
    return folder


def write_checkpoint(path, name, flags, dictionary):
    """A checkpoint of a fresh model, as fairseq-train leaves it; the model."""
    resolved = argparse.Namespace(_name=name, arch=name, **flags)
    ARCH_CONFIG_REGISTRY[name](resolved)
    task = task_of(dictionary)
    model = ARCH_MODEL_REGISTRY[name].build_model(argparse.Namespace(**vars(resolved)), task).eval()
    model.load_state_dict(model.state_dict())  # fairseq's own fills its unused copies then
    cfg = {"model": resolved, "task": {"_name": "translation", "data": "x", "source_lang": "src", "target_lang": "tgt"}}
    history = [{"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 3}]
    torch.save({"cfg": cfg, "args": None, "model": model.state_dict(), "optimizer_history": history,
                "extra_state": {"train_iterator": {}}}, path)  # fmt: skip
    return model


def package(checkpoint, data, output, *words):
    return main(["package", str(checkpoint), "--data", str(data), "--output", str(output), *words])


def loaded(path, data):
    (model,), _, _ = load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(data)})
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_to_the_last_bit(name, dictionary, data, batch, tmp_path):
    original = write_checkpoint(tmp_path / "c.pt", name, MODELS[name], dictionary)
    assert package(tmp_path / "c.pt", data, tmp_path / "made") == 0
    os.rename(tmp_path / "made", tmp_path / "moved")
    model = loaded(tmp_path / "moved/model.safetensors", tmp_path / "moved")
    back, state = model.state_dict(), original.state_dict()
    upgrade_layers(state)  # fairseq's own has unused copies
    assert back.keys() == state.keys()
    assert [key for key in state if not torch.equal(back[key], state[key]) and not key.endswith(EMPTY[0])] == []
    atol = 1e-5 if name == "transformer_iwslt_de_en" else 0.0  # comes back as its twin, with other kernels
    words = batch[2].ne(dictionary.pad())
    torch.testing.assert_close(model(*batch)[0][words], original(*batch)[0][words], rtol=0, atol=atol)


@pytest.fixture
def dlcl(dictionary, tmp_path):
    """The weights of a checkpoint in c.pt."""
    return write_checkpoint(tmp_path / "c.pt", DLCL, tiny_flags(DLCL), dictionary).state_dict()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_the_same_weights_rounded(dtype, dlcl, data, tmp_path):
    assert package(tmp_path / "c.pt", data, tmp_path / "made", "--dtype", dtype) == 0
    found = packaged.load(str(tmp_path / "made/model.safetensors")).tensors
    kind = getattr(torch, dtype)
    assert found.keys() == dlcl.keys()
    kept = [key for key in sorted(found) if found[key].dtype == torch.float32]  # as the model does in training
    assert kept == ["decoder.history.weight", "encoder.history.weight"]
    kinds = {key: torch.float32 if key in kept else kind for key in dlcl}
    assert all(torch.equal(found[key], dlcl[key].to(kinds[key])) for key in dlcl if not key.endswith(EMPTY))
    model = loaded(tmp_path / "made/model.safetensors", data)
    assert torch.equal(model.encoder.embed_tokens.weight, dlcl["encoder.embed_tokens.weight"].to(kind).float())
    # a checkpoint in half precision stays what it is
    half = torch.load(tmp_path / "c.pt", weights_only=False)
    half["model"] = {key: value.to(kind) for key, value in half["model"].items()}
    torch.save(half, tmp_path / "half.pt")
    assert package(tmp_path / "half.pt", data, tmp_path / "again") == 0
    again = packaged.load(str(tmp_path / "again/model.safetensors")).tensors
    assert {value.dtype for key, value in again.items() if not key.endswith(EMPTY)} == {kind}


def test_tied_tensors_are_stored_once_and_packages_of_one_checkpoint_are_alike(dictionary, data, tmp_path):
    write_checkpoint(tmp_path / "c.pt", DLCL, {**tiny_flags(DLCL), "share_all_embeddings": True}, dictionary)
    for made in ("a/model", "b/model"):
        (tmp_path / made).parent.mkdir()
        assert package(tmp_path / "c.pt", data, tmp_path / made) == 0
    assert (tmp_path / "a/model/SHA256SUMS").read_text() == (tmp_path / "b/model/SHA256SUMS").read_text()
    stored = load_file(tmp_path / "a/model/model.safetensors")
    shaped = [key for key, value in stored.items() if value.shape == (VOCAB, 16)]
    assert shaped == ["encoder.embed_tokens.weight"]
    found = packaged.load(str(tmp_path / "a/model/model.safetensors")).tensors
    assert found["decoder.output_projection.weight"] is found["encoder.embed_tokens.weight"]
