"""Multi-head attention: dropout, weights; its equations, with all options, are proven in ``test_whole_models.py``."""

import pytest
import torch

from fairseq_deep.core.attention import MultiheadAttention
from fairseq_deep.core.stack import Stack


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_dropout_acts_on_the_weights_in_training_only(need_weights):
    """Values of one, projected by nothing: the output is the sum of the weights that are left, doubled."""
    module = MultiheadAttention(Stack(1, 2, attention_dropout=0.5), bias=False)
    with torch.no_grad():
        module.q_proj.weight.zero_()
        module.out_proj.weight.copy_(torch.eye(2))
        module.v_proj.weight.copy_(torch.eye(2))
    x = torch.ones(8, 40, 2)
    output = module(x, need_weights=need_weights)[0].detach()
    eighths = set((output * 4).round(decimals=4).unique().tolist())
    assert eighths <= set(map(float, range(9))) and len(eighths) > 4
    assert output.mean() == pytest.approx(1.0, abs=0.1)
    torch.testing.assert_close(module.eval()(x, need_weights=need_weights)[0], x)


def test_training_rounds_alike_with_and_without_gradients():
    """Recomputation trusts in it: its first pass has no gradients, its second one has."""
    attention, x = MultiheadAttention(Stack(1, 16, heads=2, attention_dropout=0.1)), torch.randn(30, 3, 16)
    found = []
    for wanted in (False, True):
        torch.manual_seed(1)
        with torch.set_grad_enabled(wanted):
            found.append(attention(x, causal=True)[0])
    assert torch.equal(*found)


def test_causal_weights_are_of_no_later_position():
    """Models ask for those of the attention to the source alone."""
    attention, x = MultiheadAttention(Stack(1, 16, heads=2)).eval(), torch.randn(5, 3, 16)
    (output, weights), expected = attention(x, causal=True, need_weights=True), attention(x, causal=True)[0]
    torch.testing.assert_close(output, expected)
    assert not weights.triu(1).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
