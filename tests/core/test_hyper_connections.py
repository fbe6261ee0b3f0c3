"""Hyper-Connections and mHC: the equations, equal-to-plain starts, half precision, counts, bad input."""

import pytest
import torch

from fairseq_deep.core.aggregators.hyper_connections import KINDS, HyperConnections, sinkhorn
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.models.compiling import compile_calls, graphs
from tests.helpers.aggregators import make_layers
from tests.helpers.models import full_size, size_of
from tests.helpers.tensors import shake
from tests.reference.naive_hyper import hyper_connections

T, B, C, L = 5, 3, 7, 2
TINY = "transformer_prenorm_2l2l_tiny"
HYPER = {"layer_agg": "hyper-connections"}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, streams, layers=L, side="encoder", dim=C):
    layout = HyperConnections.layout(side, {})
    return HyperConnections(Stack(layers, dim, side=side, layout=layout), streams=streams, kind=kind)


def run(aggregator, y_0, sublayers):
    """The inputs of all sub-layers, and the output."""
    state, path = aggregator.start(y_0), []
    for index, sublayer in enumerate(sublayers):
        path.append(aggregator.read(state, index))
        state = aggregator.write(state, index, sublayer(path[-1]))
    assert torch.equal(aggregator.layer_output(state, path[-1]), aggregator.finish(state))
    return [*path, aggregator.finish(state)]


@each_kind
@pytest.mark.parametrize("streams, side", [(1, "encoder"), (2, "decoder"), (4, "encoder")])
def test_the_equations_forward_and_backward(kind, streams, side):
    aggregator = shake(make(kind, streams, side=side).double(), 0.7)
    sublayers = make_layers(aggregator.num_layers, C)
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    sources = [y_0, *aggregator.parameters(), *(p for sublayer in sublayers for p in sublayer.parameters())]
    want = hyper_connections(y_0, sublayers, aggregator.mixers, kind, streams)
    got = run(aggregator, y_0, sublayers)
    torch.testing.assert_close(torch.stack(got), torch.stack(want))
    directions = [torch.randn_like(y_0) for _ in want]
    totals = [sum((one * way).sum() for one, way in zip(path, directions)) for path in (want, got)]
    grads = [torch.autograd.grad(total, sources) for total in totals]
    for want_grad, got_grad in zip(*grads):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-6, atol=1e-9)
    assert all(grad.any() for grad in grads[1]) or (kind, streams) == ("manifold", 1)  # whose A is always 1


@each_kind
@pytest.mark.parametrize("streams", [1, 4])
def test_a_fresh_model_is_the_plain_one(kind, streams, build, batch):
    flags = {**HYPER, "hyper_connections_streams": streams, "hyper_connections_kind": kind}
    model, plain = build(TINY, **flags).double().eval(), build(TINY).double().eval()
    own = model.state_dict()
    norms = {"encoder": ("self_attn", "final"), "decoder": ("self_attn", "encoder_attn", "final")}
    for key, value in plain.state_dict().items():
        side, part, *rest = key.split(".")
        if part == "layers":
            module = {"fc1": "final", "fc2": "final"}.get(rest[1], rest[1].replace("_layer_norm", ""))
            rest[0] = str(int(rest[0]) * len(norms[side]) + norms[side].index(module))
        value.copy_(own[".".join([side, part, *rest])])
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0], rtol=1e-12, atol=1e-12)


def test_streams_start_as_copies_and_each_sublayer_prefers_one():
    for kind in KINDS:
        aggregator = make(kind, 3)
        y_0 = torch.randn(T, B, C)
        h, rest, writes = aggregator.start(y_0)
        torch.testing.assert_close(h, y_0)
        torch.testing.assert_close(rest, y_0.unsqueeze(2).expand(T, B, 3, C))
        torch.testing.assert_close(writes.expand(T, B, 3), torch.ones(T, B, 3))
        assert [mixer.reads[0].argmax().item() for mixer in aggregator.mixers] == [0, 1, 2, 0]


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_matrices_of_mhc_are_doubly_stochastic(scale):
    """Also from logits whose exponentials overflow; convergence is slow where one entry rules."""
    found = sinkhorn(scale * torch.randn(50, 4, 4))
    assert found.isfinite().all() and (found >= 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(50, 4))
    if scale == 1:
        torch.testing.assert_close(found.sum(-2), torch.ones(50, 4), atol=0.02, rtol=0)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_up_in_fp32(kind, dtype):
    """Streams that exceed the range of fp16 do not overflow, and small outputs are not lost."""
    aggregator = make(kind, 2).to(dtype)
    state = aggregator.start(torch.ones(T, B, C).to(dtype))
    for index in range(aggregator.num_layers):
        assert state[0].dtype == dtype and {entry.dtype for entry in state[1:2]} == {torch.float32}
        state = aggregator.write(state, index, torch.full((T, B, C), 2.0**-9).to(dtype))
    expected = 1 + aggregator.num_layers * 2.0**-9
    torch.testing.assert_close(aggregator.finish(state).float().mean().item(), expected, rtol=2**-8, atol=0)
    state = aggregator.start(torch.full((T, B, C), 6e4).to(dtype))
    for index in range(2):
        state = aggregator.write(state, index, torch.full((T, B, C), 6e4).to(dtype))
    assert state[1].isfinite().all() and state[1].max() > 1e5
    # like the plain stream, input and output of a stack are in half precision: they overflow where it does, not earlier
    state = aggregator.start(torch.full((T, B, C), 6e4).to(dtype))
    for index in range(aggregator.num_layers):
        assert state[0].isfinite().all()
        state = aggregator.write(state, index, torch.zeros(T, B, C).to(dtype))
    torch.testing.assert_close(aggregator.finish(state).float(), torch.full((T, B, C), 6e4), rtol=2**-8, atol=0)


def test_autocast_does_not_lower_the_streams():
    aggregator, y_0 = shake(make("dynamic", 2)), torch.randn(T, B, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = aggregator.start(y_0)
    for entry, exact in zip(lowered, aggregator.start(y_0)):
        assert torch.equal(entry, exact)


def test_the_gain_is_that_of_the_product_of_all_matrices():
    aggregator = make("static", 2)
    assert aggregator.record()["gain"] == 1
    with torch.no_grad():
        for mixer in aggregator.mixers:
            mixer.reads[1:] = torch.tensor([[1.0, -1.0], [0.0, 1.0]])
    assert aggregator.record()["gain"] == 1 + aggregator.num_layers
    assert not make("manifold", 2).record()


@pytest.mark.parametrize("kind", ["dynamic", "manifold"])
def test_compiled_weights_are_few_functions_for_all_sublayers(kind):
    torch._dynamo.reset()
    aggregator = shake(make(kind, 2, layers=5)).train()
    sublayers = [torch.nn.Linear(C, C) for _ in range(aggregator.num_layers)]
    y_0, before = torch.randn(T, B, C), graphs()
    expected = torch.stack(run(aggregator, y_0, sublayers))
    compiler = compile_calls(aggregator.compiled(), "eager")
    torch.testing.assert_close(torch.stack(run(aggregator, y_0, sublayers)), expected)
    assert None not in compiler.functions.values() and graphs() - before <= 3 < aggregator.num_layers


PRE_6L, N = 61_569_024, 12 + 18
PER_SUBLAYER = {  # n 4, d 512
    "static": 4 * 4 + 2 * 4,
    "dynamic": 4 * 4 + 2 * 4 + (4 + 4) * 512 + 2,
    "manifold": (4 * 4 + 2 * 4) * (4 * 512 + 1) + 3,
}


@each_kind
def test_parameter_counts(kind):
    flags = {**HYPER, "hyper_connections_kind": kind}
    model = full_size("transformer_prenorm_6l", 34040, share_all_embeddings=True, **flags)
    assert size_of(model) == PRE_6L + N * PER_SUBLAYER[kind]


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"hyper_connections_streams": 0}, "--hyper-connections-streams 0 must be 1 or more: the paper uses 4"),
        ({"hyper_connections_kind": "statik"}, "statik is unknown (did you mean static?); choose from dynamic"),
        ({"hyper_connections_kind": "manifold", "hyper_connections_streams": 57}, "57 must be at most 56 with"),
        ({"layer_agg": "dlcl", "hyper_connections_streams": 2}, "--hyper-connections-streams has no effect without"),
        ({"decoder_normalize_before": False}, "--decoder-normalize-before has no effect: --layer-agg hyper-connec"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY, **{**HYPER, **flags})
    assert words in str(error.value) and "\n" not in str(error.value)
