"""Weights of post-norm connections, folded into plain layers (core/stream_folding.py)."""

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stream_folding import fold_streams
from tests.helpers.models import POSTNORM
from tests.helpers.tensors import shake

METHODS = {"deepnet": {"deep_init": "deepnet"}, "admin": {"deep_init": "admin", "admin_start": "n"}}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
PLACES = {
    "a norm of the embeddings": ({"layernorm_embedding": True}, False),
    "learned positions": (LEARNED, False),
    "positions that are stored": ({}, True),
    "no positions": ({"no_token_positional_embeddings": True}, False),
}
DEPTHS = {"encoder_layers": 3, "decoder_layers": 2, "max_source_positions": 32, "max_target_positions": 32}


def made(build, **flags):
    """A model in double precision whose weights differ from all initial values."""
    model = shake(build(POSTNORM, **DEPTHS, **flags), 0.3).eval().double()
    with torch.no_grad():
        for layer in [*model.encoder.layers, *model.decoder.layers]:
            for parameter in layer.residual.parameters():
                parameter.uniform_(0.5, 3.0)
    return model


def scores(model, batch):
    with torch.no_grad():
        return model(*batch)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_a_plain_model_with_the_folded_weights_gives_the_same_scores(method, place, build, batch):
    flags, tables = PLACES[place]
    model = made(build, **METHODS[method], **flags)
    expected, output = scores(model, batch), model.decoder.output_projection.weight.clone()
    assert fold_streams(model, tables) == {"encoder", "decoder"}
    torch.testing.assert_close(scores(model, batch), expected, rtol=0, atol=2e-6)
    plain = build(POSTNORM, **DEPTHS, **flags, share_all_embeddings=False).eval().double()
    plain.load_state_dict(model.state_dict())
    if tables:
        for side in ("encoder", "decoder"):
            getattr(plain, side).embed_positions.weights = getattr(model, side).embed_positions.weights
    torch.testing.assert_close(scores(plain, batch), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(model.decoder.output_projection.weight, output, rtol=0, atol=0)
    assert fold_streams(model, tables) == set()


def test_above_fixed_positions_a_number_is_divided_out(build, batch):
    """The first norm of each stack then differs by its eps, and the embeddings stay as they are."""
    model = made(build, **METHODS["deepnet"], share_all_embeddings=True)
    expected, table = scores(model, batch), model.encoder.embed_tokens
    assert fold_streams(model) == {"encoder", "decoder"}
    assert model.encoder.embed_tokens is table
    difference = (scores(model, batch) - expected).abs().max()
    assert 0 < difference < 1e-6


@pytest.mark.parametrize("problem", ["by feature", "are 0 or not finite"])
def test_what_cannot_be_folded_is_refused_and_stays(problem, build, batch):
    model = made(build, **METHODS["admin"])
    if problem == "are 0 or not finite":
        with torch.no_grad():
            model.decoder.layers[1].residual.weight[2, 3] = 0.0
    expected = scores(model, batch)
    with pytest.raises(UsageError, match=problem):
        fold_streams(model, tables=problem != "by feature")
    assert torch.equal(scores(model, batch), expected)
