"""Packaged models come back to the last bit."""

import os
import shutil

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from safetensors.torch import load_file

from fairseq_deep.cli import main
from fairseq_deep.core.checkpoints import upgrade_layers
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.runtime import packaged
from tests.helpers.exports import EMPTY, write_model
from tests.helpers.hostile import write_dictionaries
from tests.helpers.methods import DLCL
from tests.helpers.models import VOCAB
from tests.helpers.paths import STOCK

FAMILIES = {row.family: row.name for row in sorted(ARCHITECTURES.values(), key=lambda row: -row.encoder_layers)}
"""The shallowest architecture of each family."""


def package(checkpoint, output, *words):
    return main(["package", str(checkpoint), "--output", str(output), *words])


def loaded(path, **settings):
    (model,), _, _ = load_model_ensemble_and_task([str(path)], arg_overrides=settings)
    return model.eval()


def assert_same(model, original, *batch, atol=0.0):
    back, state = model.state_dict(), original.state_dict()
    upgrade_layers(state)  # fairseq's own has unused copies
    assert back.keys() == state.keys()
    assert [key for key in state if not torch.equal(back[key], state[key]) and not key.endswith(EMPTY[0])] == []
    torch.testing.assert_close(model(*batch)[0], original(*batch)[0], rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*FAMILIES.values(), "transformer_lstm_share_all_6l"])
def test_a_model_comes_back_to_the_last_bit(name, dictionary, batch, tmp_path):
    original = write_model(tmp_path, name.removeprefix("transformer_"), (dictionary, dictionary), decoder_layers=2)
    assert package(tmp_path / "model.pt", tmp_path / "made") == 0
    os.rename(tmp_path / "made", tmp_path / "moved")
    assert_same(loaded(tmp_path / "moved/model.safetensors"), original, *batch)


def test_a_model_of_fairseq_comes_back_as_its_twin(tmp_path):
    """With other kernels."""
    path = shutil.copy(STOCK, tmp_path / "model.pt")
    write_dictionaries(tmp_path, "src", "tgt")
    assert package(path, tmp_path / "made", "-s", "src", "-t", "tgt") == 0
    tokens = torch.tensor([[5, 6, 7, 2]])
    batch = tokens, torch.tensor([4]), tokens.roll(1)
    original = loaded(path, source_lang="src", target_lang="tgt")
    assert_same(loaded(tmp_path / "made/model.safetensors"), original, *batch, atol=1e-5)


@pytest.fixture
def dlcl(dictionary, tmp_path):
    """The weights of a checkpoint in model.pt."""
    return write_model(tmp_path, DLCL.removeprefix("transformer_"), (dictionary, dictionary)).state_dict()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_the_same_weights_rounded(dtype, dlcl, tmp_path):
    assert package(tmp_path / "model.pt", tmp_path / "made", "--dtype", dtype) == 0
    found = packaged.load(str(tmp_path / "made/model.safetensors")).tensors
    kind = getattr(torch, dtype)
    assert found.keys() == dlcl.keys()
    kept = [key for key in sorted(found) if found[key].dtype == torch.float32]  # as the model does in training
    assert kept == ["decoder.history.weight", "encoder.history.weight"]
    kinds = {key: torch.float32 if key in kept else kind for key in dlcl}
    assert all(torch.equal(found[key], dlcl[key].to(kinds[key])) for key in dlcl if not key.endswith(EMPTY))
    model = loaded(tmp_path / "made/model.safetensors")
    assert torch.equal(model.encoder.embed_tokens.weight, dlcl["encoder.embed_tokens.weight"].to(kind).float())
    # a checkpoint in half precision stays what it is
    half = torch.load(tmp_path / "model.pt", weights_only=False)
    half["model"] = {key: value.to(kind) for key, value in half["model"].items()}
    torch.save(half, tmp_path / "half.pt")
    assert package(tmp_path / "half.pt", tmp_path / "again") == 0
    again = packaged.load(str(tmp_path / "again/model.safetensors")).tensors
    assert {value.dtype for key, value in again.items() if not key.endswith(EMPTY)} == {kind}


@pytest.mark.parametrize("flag, owner", [
    ("share_all_embeddings", "encoder"), ("share_decoder_input_output_embed", "decoder"),
])  # fmt: skip
def test_tied_tensors_are_stored_once_and_packages_of_one_checkpoint_are_alike(flag, owner, dictionary, tmp_path):
    write_model(tmp_path, DLCL.removeprefix("transformer_"), (dictionary, dictionary), **{flag: True})
    for made in ("a/model", "b/model"):
        (tmp_path / made).parent.mkdir()
        assert package(tmp_path / "model.pt", tmp_path / made) == 0
    assert (tmp_path / "a/model/SHA256SUMS").read_text() == (tmp_path / "b/model/SHA256SUMS").read_text()
    stored = load_file(tmp_path / "a/model/model.safetensors")
    shaped = [key for key, value in stored.items() if value.shape == (VOCAB, 16)]
    assert sorted(shaped) == sorted({"encoder.embed_tokens.weight", f"{owner}.embed_tokens.weight"})
    found = packaged.load(str(tmp_path / "a/model/model.safetensors")).tensors
    assert found["decoder.output_projection.weight"] is found[f"{owner}.embed_tokens.weight"]
