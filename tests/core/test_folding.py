"""Weights of connections, folded into those of plain layers: constant factors, and weights of post-norm streams."""

import pytest
import torch

from fairseq_deep.core.folding import fold
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.stream_folding import fold_streams
from tests.helpers.methods import FORMS_OF_RESIDUALS, PLACED
from tests.helpers.models import POSTNORM, TINY
from tests.helpers.tensors import shake

FOLDABLE = [(form, norm) for form, norm in PLACED if RESIDUALS.get(form.split()[0]).foldable]
GROWING = [(form, norm) for form, norm in FOLDABLE if form.startswith(("br", "pr"))]
METHODS = {"deepnet": {"deep_init": "deepnet"}, "admin": {"deep_init": "admin", "admin_start": "n"}}
PLACES = {
    "a norm of the embeddings": {"layernorm_embedding": True},
    "learned positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "positions that are stored": {},
    "no positions": {"no_token_positional_embeddings": True},
}
STORED, FIXED = "positions that are stored", "deepnet, fixed positions"
# a plain architecture, its flags, and those of the method
CASES = {f"{norm}-norm {form}": (TINY[norm], {}, FORMS_OF_RESIDUALS[form]) for form, norm in FOLDABLE}
CASES |= {f"{method}, {place}": (POSTNORM, flags, METHODS[method])
          for method in METHODS for place, flags in PLACES.items()}  # fmt: skip
# a number is divided out: the first norm of each stack differs by its eps, and the embeddings stay as they are
CASES[FIXED] = POSTNORM, {"share_all_embeddings": True}, METHODS["deepnet"]
DEPTHS = {"encoder_layers": 3, "decoder_layers": 2, "max_source_positions": 32, "max_target_positions": 32}

pytestmark = pytest.mark.usefixtures("no_gradients")


def made(build, name=POSTNORM, **flags):
    """A model in double precision whose weights differ from all initial values."""
    model = shake(build(name, **DEPTHS, **flags), 0.3).eval().double()
    model.set_num_updates(100)
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        for parameter in layer.residual.parameters():
            parameter.uniform_(0.5, 3.0)
    return model


def values(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def changed(model, before):
    return {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}


def test_the_methods_with_constant_factors_are_foldable():
    names = {form.split()[0] for form, _ in FOLDABLE}
    assert names == {"branchnorm", "completep", "layernorm-scaling", "layerscale", "prores"}
    assert RESIDUALS.get("plain").foldable


@pytest.mark.parametrize("case", CASES)
def test_a_plain_model_with_the_folded_weights_gives_the_same_scores(case, build, batch):
    name, flags, method = CASES[case]
    model, streams = made(build, name, **flags, **method), "deep_init" in method
    before, expected = values(model), model(*batch)[0]
    run = (lambda: fold_streams(model, STORED in case)) if streams else lambda: fold(model)
    assert run() == ({"encoder", "decoder"} if streams else None)
    found = changed(model, before)
    if streams:
        assert "decoder.output_projection.weight" not in found
        assert case != FIXED or found and not any("embed" in key for key in found)
    else:
        grows = case.endswith(("branchnorm", "prores"))  # to plain connections
        assert bool(found) != grows and all(".layers." in key for key in found)
    plain = build(name, **DEPTHS, **flags).eval().double()
    plain.load_state_dict(model.state_dict())
    if STORED in case:
        for side in ("encoder", "decoder"):
            getattr(plain, side).embed_positions.weights = getattr(model, side).embed_positions.weights
    for each in (model, plain):
        torch.testing.assert_close(each(*batch)[0], expected, rtol=0, atol=2e-6)
    before = values(model)
    assert not run() and not changed(model, before), "nothing is folded twice"


@pytest.mark.parametrize("form, norm", GROWING)
def test_a_growing_branch_is_not_folded(form, norm, build):
    model = build(TINY[norm], **FORMS_OF_RESIDUALS[form])
    model.set_num_updates(8)  # of 10 in the last layers
    before = values(model)
    with pytest.raises(UsageError, match=r"layer \d of the encoder is at 0.9 of its size\): use a checkpoint of u"):
        fold(model)
    assert not changed(model, before)


@pytest.mark.parametrize("problem", ["by feature", "are 0 or not finite"])
def test_what_cannot_be_folded_is_refused_and_stays(problem, build, batch):
    model = made(build, **METHODS["admin"])
    if problem == "are 0 or not finite":
        model.decoder.layers[1].residual.weight[2, 3] = 0.0
    expected = model(*batch)[0]
    with pytest.raises(UsageError, match=problem):
        fold_streams(model, tables=problem != "by feature")
    assert torch.equal(model(*batch)[0], expected)
