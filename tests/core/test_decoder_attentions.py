"""Attentions of decoders alone: precision, long sequences.

Their equations are proven in ``test_whole_models.py``, steps in ``test_steps.py``.
"""

import copy
import functools

import pytest
import torch

from fairseq_deep.core.attention import LayerContext, RunningMean, SharedBeamState, Ssru, luna_causal
from fairseq_deep.core.attention import scan as scans
from fairseq_deep.core.attention.luna_causal import LunaCausalAttention
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.methods import KINDS, LUNA
from tests.helpers.models import POSTNORM
from tests.helpers.tensors import DOUBLE, assert_same, saved_bytes, shake
from tests.reference.naive_decoder_attentions import causal, ssru
from tests.reference.naive_parts import linear, projections

B, C, H, L = 3, 16, 2, 3
CAUSAL = LayerContext(causal=True)


def run_in_steps(module, x, words=None, **more):
    """The outputs of all positions, one after the other, and the state; *words*: B x T, false at padding."""
    words = torch.ones(x.size(1), len(x), dtype=torch.bool) if words is None else words
    state, beams, outputs = {}, SharedBeamState(attends=False, averages=True), []
    for t in range(len(x)):
        step = beams(state, x.size(1), x[t : t + 1], words[:, t : t + 1])
        found = module(x[t : t + 1], LayerContext(cache=state, step=step, **more))
        outputs.append(found[0] if isinstance(found, tuple) else found)
    return torch.cat(outputs), state


def luna(dim=C):
    return LunaCausalAttention(Stack(1, dim, side="decoder", heads=H), True, L)


def order_number(x):
    """The place of each fp16 or bf16 number among all of its type, so that neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1024, pytest.param(4096, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shift", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("steps", [False, True], ids=["full", "steps"])
@torch.no_grad()
def test_means_in_half_precision_are_exact_to_the_last_digit(dtype, length, shift, steps):
    """The fp64 mean, rounded: where that lies almost between two numbers, the other one may come out.

    With a shift of 60, the sums are beyond what fp16 can hold.
    """
    x, words = (torch.randn(length, 2, 64) + shift).to(dtype), torch.ones(2, length, dtype=torch.bool)
    words[0, :300], words[1, ::2] = False, False
    counted, mean = words.T.double().unsqueeze(2), RunningMean()
    exact = (x.double() * counted).cumsum(0) / counted.cumsum(0).clamp(min=1)
    actual = run_in_steps(mean, x, words)[0] if steps else mean(x, LayerContext(padding=~words, causal=True))
    assert actual.dtype == dtype
    distance = (order_number(actual) - order_number(exact.to(dtype))).abs()
    assert distance.max() <= 1 and distance.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["ssru", "luna"])
@torch.no_grad()
def test_half_precision_keeps_the_state_in_fp32(kind, dtype):
    """Gates near 1 change a state by less than half precision can add; sums of products of 20,000 are beyond it."""
    if kind == "ssru":
        module, more = Ssru(64), {}
        module.gate.bias.fill_(8.0)
    else:
        module, more = luna(64), {"memory": torch.randn(2 * L, 2, 64).to(dtype)}
        for name, size in (("q_proj", 60.0), ("k_proj", 60.0), ("v_proj", 200.0)):
            getattr(module, name).weight.copy_(size * torch.eye(64))
    module, x = module.to(dtype), (1.0 + torch.randn(400, 2, 64) * (1 if kind == "ssru" else 0.1)).to(dtype)
    in_double = CAUSAL._replace(**{key: p.double() for key, p in more.items()})
    wanted = copy.deepcopy(module).double()(x.double(), in_double)[0]
    full, (steps, state) = module(x, CAUSAL._replace(**more))[0], run_in_steps(module, x, **more)
    vectors = [kept["vector"] for kept in state.values() if "vector" in kept]
    assert {kept.dtype for kept in vectors} == {torch.float32} and full.dtype == steps.dtype == dtype
    for got in (full, steps):
        assert got.isfinite().all()
        assert (got.double() - wanted)[-1].abs().mean() < 0.05 * wanted[-1].abs().mean()


# --- sequences in logarithmic depth, and in blocks ---


@pytest.fixture(params=[False, True], ids=["", "compiling"])
def compiles(request, monkeypatch):
    """As a compiler sees it."""
    for module in (luna_causal, scans):
        monkeypatch.setattr(module, "is_compiling", lambda: request.param)


@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 8, 21])
def test_all_positions_at_once_equal_one_after_the_other(length, compiles, monkeypatch):
    """With all gradients; Luna's in blocks of two."""
    monkeypatch.setattr(luna_causal, "BLOCK", 2)
    x, p = (torch.randn(size, B, C, **DOUBLE).requires_grad_() for size in (length, L))
    recurrence, attention = shake(Ssru(C).double()), shake(luna().double())
    wanted = ssru(x, torch.ones(B, length, dtype=torch.bool), recurrence)
    assert_same(recurrence(x, CAUSAL)[0], wanted, [x, *recurrence.parameters()])
    named = projections(attention, ("q", "k", "v", "pq", "pc", "out"))
    heads = torch.stack([causal(x[:, b], p[:, b], named, H) for b in range(B)], dim=1)
    wanted, found = linear(heads, named["out"]), attention(x, LayerContext(torch.cat([p, p]), causal=True))[0]
    assert_same(found, wanted, [x, p, *attention.parameters()], True)


def test_open_and_closed_gates_over_a_thousand_positions(compiles):
    """Products of a thousand factors are 0 or near 1: states and gradients in fp32 stay near fp64."""
    z = torch.cat([torch.full((1000, 1, 1), value) for value in (-200.0, -20.0, 0.0, 8.0, 200.0, float("inf"))], dim=2)
    v, results = torch.randn(1000, 1, 6), []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (z, v)]
        states = scans.gated_recurrence(*leaves)
        results.append([states, *torch.autograd.grad(states.square().sum(), leaves)])
    for got, exact in zip(*results):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][0][:, :, 0], v[:, :, 0])
    assert results[0][0][:, :, 5].eq(0).all()


def test_what_ssru_keeps_for_the_backward_pass_does_not_grow_with_the_levels():
    """Gates, inputs and states: three tensors, and the output for the ReLU, at 4,096 positions."""
    x, module = torch.randn(4096, 1, 8, requires_grad=True), Ssru(8)
    assert saved_bytes(lambda: module(x, CAUSAL)) <= 4 * 6 * x.numel()


def test_a_compiler_makes_one_graph_of_ssru_for_all_lengths():
    """With the gradients of the module as it is, also where that of the output is transposed."""
    module, graphs = Ssru(6), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Ssru.forward, backend=backend, dynamic=True, fullgraph=True)
    for length in (5, 9, 16):
        x = torch.randn(length, B, 6, requires_grad=True)
        sources, direction = [x, *module.parameters()], torch.randn(B, length, 6).transpose(0, 1)
        found = [run(x, CAUSAL)[0] for run in (module, functools.partial(compiled, module))]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(output, sources, direction) for output in found))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["ssru", "luna"])
def test_what_an_attention_cannot_give_is_refused(kind, build, batch):
    model = build(POSTNORM, **{**KINDS, "luna": LUNA}[kind])
    with pytest.raises(UsageError, match=f"--decoder-attn {kind} does not see later positions: omit"):
        model.decoder(batch[2], model.encoder(*batch[:2]), full_context_alignment=True)
    if kind == "luna":
        with pytest.raises(UsageError, match="luna has no weights of source words: omit --print-alignment"):
            model.make_generation_fast_(need_attn=True)
