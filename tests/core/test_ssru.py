"""SSRU: the scan against one position after the other, half precision, memory, compiled code.

The equations of the module and its gradients are in ``test_whole_models.py``.
"""

import pytest
import torch

from fairseq_deep.core.attention import SharedBeamState, Ssru
from fairseq_deep.core.attention import scan as scans
from fairseq_deep.core.registry import UsageError
from tests.helpers.tensors import DOUBLE, assert_same, saved_bytes
from tests.reference.naive_ssru import ssru

T, B, C = 7, 3, 6
LENGTHS = (1, 2, 3, 6, 7, 8, 21)


def one_by_one(z, v):
    """c_t of the gates' arguments *z* and inputs *v*."""
    c, states = torch.zeros_like(v[0]), []
    for position in range(len(v)):
        f = 1 / (1 + torch.exp(-z[position]))
        c = f * c + (1 - f) * v[position]
        states.append(c)
    return torch.stack(states)


def run(module, x, mask=None):
    return module(x, key_padding_mask=mask, causal=True)[0]


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiling"])
def test_the_scan_equals_one_position_after_the_other(compiles, monkeypatch):
    """With both gradients, and as a compiler sees it."""
    monkeypatch.setattr(scans, "is_compiling", lambda: compiles)
    for length in LENGTHS:
        z, v = (3 * torch.randn(length, B, C, **DOUBLE) for _ in range(2))
        z.requires_grad_(), v.requires_grad_()
        assert_same(scans.gated_recurrence(z, v), one_by_one(z, v), [z, v], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiling"])
def test_open_and_closed_gates_over_a_thousand_positions(compiles, monkeypatch):
    """Products of a thousand factors are 0 or near 1: states and gradients in fp32 stay near fp64."""
    monkeypatch.setattr(scans, "is_compiling", lambda: compiles)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_its_state_in_fp32(dtype):
    """Gates near 1 let each input change the state by less than half precision can add."""
    module = Ssru(64).to(dtype)
    with torch.no_grad():
        module.gate.bias.fill_(8.0)
        x, state, beams = torch.randn(400, 2, 64).add_(1.0).to(dtype), {}, SharedBeamState(attends=False)
        full = run(module, x)
        exact = ssru(
            x.double(), torch.ones(2, 400).bool(), (module.gate.weight.double(), module.gate.bias.double()),
            module.input_proj.weight.double(),
        )  # fmt: skip
        for position in range(400):
            now = x[position : position + 1]
            step = beams(state, 2, now, torch.ones(2, 1, dtype=torch.bool))
            last = module(now, incremental_state=state, step=step)[0]
    assert full.dtype == last.dtype == dtype and state[module._state]["vector"].dtype == torch.float32
    for got in (full[-1], last[0]):
        assert (got.double() - exact[-1]).abs().mean() < 0.02 * exact[-1].std()


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_levels():
    """Gates, inputs and states: three tensors, and the output for the ReLU, at 4,096 positions."""
    x = torch.randn(4096, 1, 8, requires_grad=True)
    module = Ssru(8)
    assert saved_bytes(lambda: run(module, x)) <= 4 * 6 * x.numel()


def test_a_compiler_makes_one_graph_for_all_lengths():
    """With the gradients of the module as it is, also where that of the output is transposed."""
    module, graphs = Ssru(C), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Ssru.forward, backend=backend, dynamic=True, fullgraph=True)
    for length in (5, 9, 16):
        x = torch.randn(length, B, C, requires_grad=True)
        sources, direction = [x, *module.parameters()], torch.randn(B, length, C).transpose(0, 1)
        expected, actual = run(module, x), compiled(module, x, causal=True)[0]
        torch.testing.assert_close(actual, expected)
        wanted = torch.autograd.grad(expected, sources, direction)
        torch.testing.assert_close(torch.autograd.grad(actual, sources, direction), wanted)
    assert len(graphs) == 1


def test_later_positions_are_refused():
    with pytest.raises(UsageError, match="--decoder-attn ssru does not see later positions: omit"):
        Ssru(C)(torch.randn(T, B, C))
