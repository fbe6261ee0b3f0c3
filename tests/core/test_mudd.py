"""Dynamic DLCL (one-way MUDDFormer): initial values, half precision.

Its equation, and that it starts as the plain stack, are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.mudd import Mudd
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import run
from tests.helpers.tensors import shake

T, B, C = 5, 3, 7


def test_initial_values():
    aggregator = Mudd(Stack(20, 256))
    assert [tuple(hidden.weight.shape) for hidden in aggregator.hidden] == [(size, 256) for size in range(2, 22)]
    assert aggregator.hidden[-1].weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert not any(out.weight.any() for out in aggregator.out) and not aggregator.matrices()
    assert torch.equal(aggregator.weights(), torch.eye(21))
    record = {name: value.item() for name, value in aggregator.record().items()}
    assert record["newest"] == 1 and record["previous"] == record["older"] == 0
    assert torch.equal(Mudd(Stack(0, C)).weights(), torch.ones(1, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_in_fp32(dtype):
    """Of entries that cancel, the small rest stays."""
    aggregator = shake(Mudd(Stack(2, C)), 0.3).to(dtype)
    with torch.no_grad():
        aggregator.out[1].weight.zero_()
        aggregator.out[1].bias.copy_(torch.tensor([0.0, 1 + 2**-13, -1.0]))
    for trains in (True, False):
        x = torch.full((T, B, C), 3e4).to(dtype).requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            output = run(aggregator, x, [lambda x: torch.full_like(x, 3e4)] * 2)
        value = x.detach()[0, 0, 0].float() * 2**-13
        torch.testing.assert_close(output.detach().float(), value.expand(T, B, C), rtol=1e-2, atol=1e-3)
