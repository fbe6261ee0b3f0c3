"""Architectures that differ from fairseq's transformer in their start alone are fairseq's transformer."""

import pytest
import torch
from fairseq import utils

from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.flags import parse
from tests.helpers.layers import DUPLICATES
from tests.helpers.models import fairseq_transformer, make_batch, tiny_flags

PLAIN_INITS = ("fairseq", "xavier", "lipschitz", "ds", "depth-scaled")
STARTS = [name for name in ARCHITECTURES if name.startswith(("transformer_lipschitz_", "transformer_ds_"))]
STARTS = [name for name in STARTS if "_matt_" not in name]
PLAIN = [*STARTS, "transformer_postnorm_6l", "transformer_prenorm_6l"]

every_plain_architecture = pytest.mark.parametrize("name", PLAIN)


def test_there_are_such_architectures():
    """Both computation orders of six depths, and five depths."""
    assert len(STARTS) == 2 * 6 + 5


def stock_transformer(name, dictionary, **flags):
    """fairseq's own narrow ``transformer`` of the depth, norm placement and norm on the embedding of the row *name*."""
    row = ARCHITECTURES[name]
    flags = {**tiny_flags(name), **flags}
    for side, layers in (("encoder", row.encoder_layers), ("decoder", row.decoder_layers)):
        flags.update({f"{side}_layers": layers, f"{side}_normalize_before": row.norm == "pre"})
    flags["layernorm_embedding"] = name.startswith("transformer_lipschitz_postnorm_")
    return fairseq_transformer(dictionary, **flags)


def shapes(state):
    """Shapes by name, without the unused copies in the encoder layers of fairseq 0.12.2."""
    return {name: tuple(value.shape) for name, value in state.items() if name.rsplit(".", 1)[-1] not in DUPLICATES}


@every_plain_architecture
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared tables"])
def test_parameters_are_those_of_fairseqs_transformer(name, shared, build, dictionary):
    stock = stock_transformer(name, dictionary, share_all_embeddings=shared)
    model = build(name, share_all_embeddings=shared)
    assert shapes(model.state_dict()) == shapes(stock.state_dict())
    ours, theirs = (dict(m.named_parameters()) for m in (model, stock))
    assert shapes(ours) == shapes(theirs)
    assert shapes(ours).keys() == ours.keys(), "ours has no copies"


def gradients(model, batch, words):
    """Scores of the *words* (B x T), and the gradients of the sum of their squares."""
    model.zero_grad()
    scores = model.train()(*batch)[0][words]
    scores.square().sum().backward()
    return scores.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@every_plain_architecture
def test_fairseqs_transformer_loads_them_and_goes_on_training(name, build, dictionary, tmp_path, monkeypatch):
    """Strictly, from a file; then scores and all gradients are the same, up to what an attention in fp32 rounds."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))  # not in fp32
    model = build(name).double()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    stock = stock_transformer(name, dictionary).double()
    stock.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)
    batch = make_batch(dictionary)
    words = batch[2].ne(dictionary.pad())
    expected, wanted = gradients(stock, batch, words)
    actual, gotten = gradients(model, batch, words)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert len(gotten) > 100
    total = torch.stack([wanted[key].norm() for key in gotten]).norm()
    for key, gradient in gotten.items():
        near = 1e-4 * wanted[key].norm() + 1e-8 * total  # that of a key bias is rounding only
        assert (gradient - wanted[key]).norm() < near, key


@pytest.mark.parametrize("init", PLAIN_INITS)
@pytest.mark.parametrize("name", ["transformer_postnorm_2l2l_tiny", "transformer_prenorm_2l2l_tiny"])
def test_a_plain_start_leaves_the_structure(init, name, build, dictionary):
    stock = stock_transformer(name, dictionary)
    model = build(name, deep_init=init)
    assert shapes(model.state_dict()) == shapes(stock.state_dict())
    stock.load_state_dict(model.state_dict(), strict=True)
    batch = make_batch(dictionary)
    words = batch[2].ne(dictionary.pad())
    torch.testing.assert_close(model.train()(*batch)[0][words], stock.train()(*batch)[0][words])


@pytest.mark.parametrize("name", STARTS)
def test_of_fairseqs_own_flags_only_those_of_the_row_differ(name):
    """Depth, width, norms and dropout; whatever else fairseq's transformer has is at its default."""
    ours, theirs = (vars(parse("--arch", arch)) for arch in (name, "transformer"))
    different = {flag for flag in theirs if ours[flag] != theirs[flag]} - {"arch"}
    assert different <= {"dropout", "attention_dropout", "activation_dropout", "encoder_layers", "decoder_layers",
                         "encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding"}  # fmt: skip
