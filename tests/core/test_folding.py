"""Constant factors of residual connections, folded into the weights (core/folding.py)."""

import pytest
import torch

from fairseq_deep.core.folding import fold
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals import RESIDUALS
from tests.helpers.models import TINY
from tests.helpers.residuals import FORMS, PLACED, flags_of, scores
from tests.helpers.tensors import shake

FOLDABLE = [(form, norm) for form, norm in PLACED if RESIDUALS.get(FORMS[form][0]).foldable]


def test_the_methods_with_constant_factors_are_foldable():
    names = {FORMS[form][0] for form, _ in FOLDABLE}
    assert names == {"branchnorm", "completep", "layernorm-scaling", "layerscale", "prores"}
    assert RESIDUALS.get("plain").foldable


@torch.no_grad()
@pytest.mark.parametrize("form, norm", FOLDABLE)
def test_a_plain_model_with_the_folded_weights_gives_the_same_scores(form, norm, build, batch):
    depths = {"encoder_layers": 3, "decoder_layers": 2}
    model = shake(build(TINY[norm], **depths, **flags_of(form)), 0.3).eval()
    model.set_num_updates(100)
    before, expected = {key: value.clone() for key, value in model.state_dict().items()}, scores(model, batch)
    fold(model)
    plain = build(TINY[norm], **depths).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(scores(plain, batch), expected, rtol=1e-5, atol=1e-5)
    after = model.state_dict()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    grows = form in ("branchnorm", "prores")  # to plain connections
    assert bool(changed) != grows and all(".layers." in key for key in changed)
    if not grows:
        plain.load_state_dict({key: before[key] for key in after})
        assert (scores(plain, batch) - expected).abs().max() > 1e-3
    fold(model)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items()), "nothing is folded twice"


@pytest.mark.parametrize("form, norm", [(form, norm) for form, norm in FOLDABLE if form.startswith(("br", "pr"))])
def test_a_growing_branch_is_not_folded(form, norm, build):
    model = build(TINY[norm], **flags_of(form))
    model.set_num_updates(8)  # of 10 in the last layers
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"layer \d of the encoder is at 0.9 of its size\): use a checkpoint of u"):
        fold(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
