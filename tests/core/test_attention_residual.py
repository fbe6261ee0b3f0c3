"""Attention Residuals: initial values, logits in fp32, number of kernels.

Their equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch
from torch import nn

from tests.helpers.aggregators import make
from tests.helpers.tensors import randomise

T, B, C, L = 5, 3, 7, 3
NAME = "attention-residual"


def test_initial_values_and_the_norm_of_the_queries_in_the_log():
    attention = make(NAME, L, C, side="decoder")
    assert attention.query.eq(0).all() and attention.gain.eq(1).all()
    assert attention.record()["query"] == 0
    nn.init.constant_(attention.query, 2.0)
    assert attention.record()["query"].item() == pytest.approx(2 * (3 * L * C) ** 0.5)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_logits_and_sums_in_fp32(dtype, learns):
    """As exact as their inputs; the state keeps the type of x."""
    outputs = torch.randn(2 * L + 1, T, B, C).to(dtype)
    rough, exact = randomise(make(NAME, L, C)).to(dtype), make(NAME, L, C).double()
    exact.load_state_dict(rough.state_dict())
    found = []
    for aggregator in (rough.requires_grad_(learns), exact.requires_grad_(learns)):
        own = aggregator.query.dtype
        state = aggregator.start(outputs[0].to(own))
        for index, output in enumerate(outputs[1:]):
            state = aggregator.write(state, index, output.to(own))
        assert {entry.dtype for entry in state if entry.dim() == 2} == {torch.promote_types(own, torch.float32)}
        found.append(state[0])
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0], found[1].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
