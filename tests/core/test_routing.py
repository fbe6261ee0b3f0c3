"""Aggregation of layers by routing: shares, limits, numbers without variance, what is recomputed.

The equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.routing import EmRouting, Routing
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import DOUBLE, saved_bytes

T, B, C, L = 3, 2, 6, 3
KINDS = ("dynamic", "em")
every_kind = pytest.mark.parametrize("kind", KINDS)
either_norm = pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])


def random_votes(capsules, size, **options):
    return torch.randn(L, T, B, capsules, size, **{**DOUBLE, **options})


LIMITS = {
    "equal votes": lambda x: [x] * L,
    "zeros": lambda x: [0 * x] * L,
    "one layer": lambda x: [x],
    "constant": lambda x: [torch.ones_like(x)] * L,
    "large": lambda x: [500 * torch.randn_like(x) for _ in range(L)],
    "far apart": lambda x: [x + 100 * index for index in range(L)],
}


@every_kind
@either_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capsules", [None, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 2))])
@pytest.mark.parametrize("case", LIMITS)
def test_no_nan_at_the_limits(kind, pre_norm, dtype, capsules, case):
    aggregator = Routing(Stack(1 if case == "one layer" else L, 64, pre_norm), kind=kind, capsules=capsules)
    for part in aggregator.maps[1:] if case == "equal votes" else ():
        part.load_state_dict(aggregator.maps[0].state_dict())
    aggregator.to(dtype)
    outputs = [y.detach().to(dtype).requires_grad_() for y in LIMITS[case](torch.randn(63, 1, 64))]
    output = aggregator.finish(outputs)
    output.float().sum().backward()
    assert output.dtype == dtype and output.shape == (63, 1, 64) and output.isfinite().all()
    assert all(tensor.grad.isfinite().all() for tensor in [*outputs, *aggregator.parameters()])


def test_a_capsule_that_no_layer_counts_for():
    """Its share underflows in every layer, in fp32: no division of zero by zero."""
    routing = EmRouting(2, 3)
    votes = random_votes(2, 32, dtype=torch.float32)
    votes[..., 1, :] *= 1e4  # wide: its density is nowhere near that of the other
    votes.requires_grad_()
    log_shares = routing.e_step(votes, *routing.m_step(votes, torch.full((L, T, B, 2), 0.5).log()))
    assert log_shares[..., 1].exp().eq(0).all()
    out = routing(votes)
    out.sum().backward()
    assert out.isfinite().all() and votes.grad.isfinite().all()


@every_kind
def test_iterations_keep_the_votes_alone(kind):
    """What is kept for the backward pass does not grow with the number of iterations."""

    def kept(iterations, recomputed=True):
        aggregator = Routing(Stack(L, 64), kind=kind, iterations=iterations)
        if not recomputed:
            aggregator._recomputed_routing = lambda votes, routing=aggregator.routing: routing(votes)
        outputs = [torch.randn(32, 2, 64, requires_grad=True) for _ in range(L)]
        return saved_bytes(lambda: aggregator.finish(outputs), aggregator.parameters())

    assert kept(6) == kept(1)
    assert kept(6, recomputed=False) > 3 * kept(6), "the measure sees what plain iterations keep"
