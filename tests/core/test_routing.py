"""Aggregation of layers by routing: shares, limits, numbers without variance, what is recomputed.

The equations are proven in ``test_aggregators.py``.
"""

import math

import pytest
import torch

from fairseq_deep.core.aggregators.routing import DynamicRouting, EmRouting, Routing
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import DOUBLE, is_uniform, saved_bytes, shake
from tests.reference.naive_dlcl import layer_norm
from tests.reference.naive_routing import squash

T, B, C, L = 3, 2, 6, 3
KINDS = ("dynamic", "em")
every_kind = pytest.mark.parametrize("kind", KINDS)
either_norm = pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])


def random_votes(capsules, size, **options):
    return torch.randn(L, T, B, capsules, size, **{**DOUBLE, **options})


def test_the_reference_squashes():
    """|squash(s)| = |s|^2 / (1 + |s|^2), in the direction of s."""
    s = torch.tensor([3.0, 4.0], **DOUBLE)
    torch.testing.assert_close(squash(s), s / 5 * 25 / 26)


@every_kind
@pytest.mark.parametrize("capsules", [1, 2, 5])
def test_shares_sum_to_one(kind, capsules):
    votes, logits = random_votes(capsules, 4), torch.randn(L, T, B, capsules, **DOUBLE)
    if kind == "dynamic":
        shares = DynamicRouting(capsules, 3).step(votes, logits)[1]
    else:
        routing = shake(EmRouting(capsules, 3)).double()
        shares = routing.e_step(votes, *routing.m_step(votes, logits.log_softmax(-1))).exp()
    assert shares.shape == (L, T, B, capsules)
    torch.testing.assert_close(shares.sum(-1), torch.ones(L, T, B, **DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_votes_are_their_mean(dtype):
    """Whatever the shares: mu is the vote and sigma 0; the shares of equal votes are equal in all layers."""
    routing, vote = EmRouting(4, 3).to(dtype), torch.randn(1, T, B, 4, 3, dtype=dtype)
    votes = vote.expand(L, -1, -1, -1, -1)
    log_shares = torch.log_softmax(5 * torch.randn(L, T, B, 4, dtype=dtype), -1)
    mean, variance, log_active = routing.m_step(votes, log_shares)
    torch.testing.assert_close(mean, vote[0])
    assert variance.max() < 1e-10
    log_shares = routing.e_step(votes, mean, variance, log_active)
    torch.testing.assert_close(log_shares, log_shares[:1].expand(L, -1, -1, -1))
    # sigma is sqrt(eps) = 1e-4 in all three dimensions, and each of the 4 capsules has a quarter of each layer
    active = 1 / (1 + math.exp(3 * math.log(1e-4) * L / 4))
    torch.testing.assert_close(routing(votes), active * vote[0], rtol=1e-4, atol=1e-5)


def test_a_close_vote_gets_the_larger_share():
    """Two capsules of which one is wide: a layer near the narrow one's mean belongs to that."""
    routing = EmRouting(2, 1).double()
    mean, variance = torch.zeros(1, 1, 2, 1, **DOUBLE), torch.tensor([1e-2, 4.0], **DOUBLE).view(1, 1, 2, 1)
    votes = torch.tensor([[0.01, 0.01], [3.0, 3.0]], **DOUBLE).view(2, 1, 1, 2, 1)
    log_shares = routing.e_step(votes, mean, variance, torch.zeros(1, 1, 2, **DOUBLE))
    shares = log_shares.exp().flatten(1)
    assert shares[0, 0] > 0.9 and shares[1, 1] > 0.9
    # the activation counts, too: log a = -20 takes the narrow one out
    log_active = torch.tensor([-20.0, 0.0], **DOUBLE).view(1, 1, 2)
    assert routing.e_step(votes, mean, variance, log_active).exp().flatten(1)[0, 1] > 0.99


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_routes_in_fp32(kind, dtype):
    aggregator = Routing(Stack(L, 64), kind=kind).to(dtype).eval()
    seen = []
    aggregator.routing.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    outputs = [torch.randn(5, 2, 64).to(dtype) for _ in range(L)]
    actual = aggregator.finish(outputs)
    assert seen == [(torch.float32, torch.float32)] and actual.dtype == dtype
    votes = torch.stack([part(y) for part, y in zip(aggregator.maps, outputs)])
    exact = aggregator.double().routing(votes.double().unflatten(-1, (64, 1))).flatten(-2)
    expected = layer_norm(exact, torch.ones(64, **DOUBLE), torch.zeros(64, **DOUBLE), eps=1e-12)
    torch.testing.assert_close(actual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@every_kind
@either_norm
@pytest.mark.parametrize("capsules", [None, 16])
def test_h_has_the_size_of_a_normalised_output_at_base_width(kind, pre_norm, capsules):
    """Before its norm, dynamic routing with 512 capsules makes H about 5e-5: an eps of 1e-5 would leave it as small."""
    aggregator = Routing(Stack(6, 512, pre_norm), kind=kind, capsules=capsules)
    with torch.no_grad():
        output = aggregator.finish([torch.randn(7, 1, 512) for _ in range(6)])
    torch.testing.assert_close(output.std(dim=-1), torch.ones(7, 1), rtol=0.01, atol=0.0)


@every_kind
@pytest.mark.parametrize("recompute, again", [(False, ["routing"]), (True, [*["map"] * L, "routing"]), (None, [])],
                         ids=["iterations", "all", "evaluation"])  # fmt: skip
def test_recomputation_changes_nothing(kind, recompute, again):
    """In training with dropout, against the same computation with everything kept."""
    results = []
    outputs = [torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(L)]
    for kept in (True, False):
        torch.manual_seed(3)
        stack = Stack(L, C, dropout=0.3, activation_dropout=0.2, recompute=bool(recompute))
        aggregator = Routing(stack, kind=kind).double().train(recompute is not None)
        calls = []
        aggregator.routing.register_forward_pre_hook(lambda *_, calls=calls: calls.append("routing"))
        for part in aggregator.maps:
            part.register_forward_pre_hook(lambda *_, calls=calls: calls.append("map"))
        if kept:
            aggregator._recomputed_routing = lambda votes, routing=aggregator.routing: routing(votes)
            aggregator.recompute = False
        output = aggregator.finish(outputs)
        grads = torch.autograd.grad(output.square().sin().sum(), [*outputs, *aggregator.parameters()])
        results.append([output, *grads])
        assert calls == [*["map"] * L, "routing", *([] if kept else again)]
    for kept, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, kept)


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


def test_initial_values_and_dropout_of_the_maps():
    aggregator = Routing(Stack(2, 16, dropout=0.3, activation_dropout=0.2))
    for part in aggregator.maps:
        assert (part.dropout.p, part.activation_dropout.p) == (0.3, 0.2)
        matrices = (part.fc1.weight, part.fc2.weight, part.vote.weight)
        assert all(is_uniform(matrix, (6 / sum(matrix.shape)) ** 0.5, 0.9) for matrix in matrices)
        assert not part.fc1.bias.any() and not part.fc2.bias.any()
    assert not aggregator.routing.beta_u.any() and not aggregator.routing.beta_a.any()
    assert [id(matrix) for matrix in aggregator.matrices()] == [
        id(part.weight) for layer in aggregator.maps for part in (layer.fc1, layer.fc2, layer.vote)
    ]
