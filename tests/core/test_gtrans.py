"""The encoder of GTrans: initial values and counts. Its equation is proven in ``test_aggregators.py``."""

import pytest
import torch

from fairseq_deep.core.aggregators.gtrans import GTrans
from fairseq_deep.core.stack import Stack
from tests.helpers.models import full_size, size_of

C = 12


def test_initial_values():
    aggregator = GTrans(Stack(7, C))
    assert aggregator.fusion.weight.tolist() == pytest.approx([1 / 3] * 3) and aggregator.fusion_norm is None
    assert {name: value.item() for name, value in aggregator.record().items()} == pytest.approx(
        {f"group_{number}": 1 / 3 for number in (1, 2, 3)}
    )
    decoder = GTrans(Stack(7, C, side="decoder"))
    assert not list(decoder.parameters()) and not decoder.record()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_half_precision_weights_does_not_overflow(dtype):
    aggregator = GTrans(Stack(5, 64), 2).to(dtype)
    state = [torch.randn(9, 1, 64).to(dtype).requires_grad_() for _ in range(3)]
    (3e4 * aggregator.finish(state).float()).sum().backward()
    weight = aggregator.fusion.weight
    assert weight.dtype == weight.grad.dtype == torch.float32 and weight.grad.isfinite().all()


@pytest.mark.parametrize("norm, added", [("pre", 4), ("post", 4 + 2 * 512)])
def test_parameter_counts(norm, added):
    plain = full_size(f"transformer_{norm}norm_12l", 34040)
    assert size_of(full_size(f"transformer_{norm}norm_12l", 34040, layer_agg="gtrans")) == size_of(plain) + added
