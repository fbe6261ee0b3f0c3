"""What the ratios leave out or refuse: stacks, sub-layers and norms that are not there, runs without gradients."""

import pytest
import torch

from fairseq_deep.core.diagnostics.parts import tensor_norms
from fairseq_deep.core.registry import UsageError
from tests.helpers.diagnostics import hooks, measure
from tests.helpers.models import POSTNORM as POST
from tests.helpers.tensors import shake


def test_a_stack_without_residual_connections_is_left_out(build, batch):
    model = build("transformer_lstm_2l2l_tiny", encoder_layer_agg="residual", encoder_ffn_embed_dim=32).train()
    found = measure(model, batch)
    assert [ratios.part for ratios in found["encoder"]] == ["self", "ffn"] * 2 and found["decoder"] == []
    with pytest.raises(UsageError, match="no residual connections"):
        measure(build("transformer_lstm_2l2l_tiny"), batch)


def test_what_has_no_part_in_the_loss_is_refused(build, batch):
    """An encoder that the decoder does not look at; layers that LayerDrop leaves out."""
    for flags in ({"no_cross_attention": True}, {"encoder_layerdrop": 1.0}):
        model = build(POST, **flags).train()
        hooked = hooks(model)
        with pytest.raises(UsageError, match="does not affect the loss"):
            measure(model, batch)
        assert hooks(model) == hooked


@pytest.mark.parametrize("method", ["tfixup", "rezero"])
def test_without_norms_there_is_no_beta_ln(build, batch, method):
    model = build(POST, deep_init=method)
    shake(model, 0.3)
    found = measure(model.train(), batch)
    for ratios in (*found["encoder"], *found["decoder"]):
        assert ratios.beta_ln is None and ratios.beta == ratios.beta_rc > 0


def test_without_gradients_the_ratios_are_refused_and_no_hook_stays(build, batch):
    """Recomputed layers run a second time, in the backward pass."""
    recomputed = ({"checkpoint_activations": True}, torch.enable_grad(), "omit --checkpoint-activations")
    for flags, context, cure in (recomputed, ({}, torch.no_grad(), "call outside no_grad")):
        model = build(POST, **flags)
        before = hooks(model)
        with pytest.raises(UsageError, match=cure), context:
            measure(model, batch)
        assert hooks(model) == before


def test_norms_are_in_fp32_or_better():
    """An fp16 gradient whose norm exceeds the largest fp16 number, and fp64, which torch does not narrow."""
    for dtype, expected in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        [norm] = tensor_norms([torch.full((4,), 60000.0, dtype=dtype)])
        assert norm.dtype == expected and norm.item() == pytest.approx(120000, rel=1e-3)
