"""Aggregators and memories: sums in half precision are as exact as their inputs; states, memory.

Of other parts, the test files of methods prove it, and of whole models ``test_methods.py``.
"""

import copy

import pytest
import torch

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.aggregators.node import Node
from fairseq_deep.core.memories.transparent import Transparent
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make, read_path, run
from tests.helpers.tensors import saved_bytes, shake
from tests.reference import naive_memories

T, B, C, L = 5, 3, 12, 6
# aggregators with options, and the error of 9 of 10 values in units of eps: half a unit where a sum is rounded once,
# more where something before it is rounded, too
METHODS = {
    "gtrans": ({"group_layers": 1}, 0.2),
    "mlrf": ({}, 0.3),
    "mudd": ({}, 0.45),
    "attention-residual": ({}, 0.45),
    "attention-residual block": ({"block": 2}, 0.5),
    **{f"hyper-connections {kind}": ({"kind": kind, "streams": 2}, 0.45) for kind in ("dynamic", "static", "manifold")},
    **{f"ode {method}": ({"method": method}, 0.55) for method in ("rk2", "rk3", "rk4")},
    **{f"ode {method}": ({"method": method}, 0.9) for method in ("rk2-learned", "rk2-init", "ema")},
    "residual-dual": ({}, 0.75),
    "dlcl": ({}, 0.7),
    "dlcl vector": ({"weight_type": "vector"}, 0.7),
}


def path(aggregator, outputs):
    """What the layers read and the output, where layer after layer returns *outputs*."""
    following = iter(outputs[1:])
    return torch.stack(read_path(aggregator, outputs[0], [lambda _: next(following)] * aggregator.num_layers))


@pytest.mark.parametrize("learns", [True, False], ids=["", "no_grad"])
@pytest.mark.parametrize("size, dtype", [(30, torch.float16), (30, torch.bfloat16), (1e4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", METHODS)
def test_sums_are_as_exact_as_their_inputs(case, size, dtype, learns):
    """Compared with fp64, from the same weights and outputs, which are alike: differences between them count."""
    options, limit = METHODS[case]
    half = shake(make(case.split()[0], L, C, **options), 0.5).to(dtype)
    exact, count = copy.deepcopy(half).double(), half.num_layers * half.num_evaluations + 1
    outputs = (size * (torch.randn(C) + torch.randn(count, T, B, C) / 30)).to(dtype)
    with torch.set_grad_enabled(learns):
        found, wanted = path(half, outputs), path(exact, outputs.double())
    assert found.dtype == dtype
    fits = wanted.abs() < 0.9 * torch.finfo(dtype).max
    assert found[fits].isfinite().all() and fits.double().mean() > 0.3
    error = (found.double() - wanted)[fits].abs() / (wanted[fits].abs() * torch.finfo(dtype).eps + 1e-9)
    assert error.quantile(0.9) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_node_of_an_aggregation_rounds_the_sum_once(dtype):
    """Nine inputs: the norm reads their exact sum, rounded once to the dtype."""
    node = Node(Stack(9, C), 9)
    torch.nn.init.zeros_(node.fc2.weight)
    node.to(dtype)
    inputs = [torch.randn(T, B, C).to(dtype) for _ in range(9)]
    assert torch.equal(node(inputs), node.layer_norm(sum(u.double() for u in inputs).to(dtype)))


# --- states ---

PLAIN = [name for name in AGGREGATORS.names() if name not in ("lstm", "rnn", "msc")]
LIMITS = {"dlcl": (2.3, 0.2), "mudd": (1.6, 0.5), "residual-dual": (1.1, 0.01), "attention-residual": (1.4, 0.31)}


@pytest.mark.parametrize("name", LIMITS)
def test_memory_grows_with_the_number_of_layers_not_its_square(name):
    """In entries per module; sums over stacked entries would keep as many tensors as there are entries below."""
    width, (limit, rise) = 128, LIMITS[name]

    def total(layers):
        aggregator, y_0 = make(name, layers, width), torch.randn(64, B, width, requires_grad=True)
        calls = [lambda x: x * 2.0] * aggregator.num_layers
        return saved_bytes(lambda: run(aggregator, y_0, calls), aggregator.parameters()) / (64 * B * width * 4)

    def growth(layers):
        return (total(2 * layers) - total(layers)) / make(name, layers, width).num_layers

    assert growth(4) < limit and abs(growth(8) - growth(4)) < rise


@pytest.mark.parametrize("name", sorted({*PLAIN} - {"hierarchical", "iterative", "linear", "routing"}))
def test_autocast_does_not_lower_sums_and_logits(name):
    """Of all methods without matrices of their own."""
    aggregator, outputs = shake(make(name, 3, C)), torch.randn(20, T, B, C)
    expected = path(aggregator, outputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(path(aggregator, outputs), expected)


FP32 = {  # options, and parameters that half precision leaves in fp32: a gradient is a sum over all words and features
    "dlcl": ({"normalize": True}, ["weight"]),
    "gtrans": ({"group_layers": 1}, ["fusion.weight"]),
    "mlrf": ({}, ["fusion.weight"]),
    "mudd": ({}, [f"{part}.{row}.{kind}" for part, kind in (("hidden", "weight"), ("out", "weight"), ("out", "bias"))
                  for row in range(3)]),
    "ode": ({"method": "rk2-learned", "history": "dlcl"}, ["inner.weight", "gate.weight", "gate.bias"]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FP32)
def test_weights_of_sums_stay_exact_in_half_precision_and_their_gradients_do_not_overflow(name, dtype):
    options, names = FP32[name]
    aggregator = shake(make(name, 3, 100, **options))
    exact = {key: value.clone() for key, value in aggregator.state_dict().items() if key in names}
    aggregator.to(dtype)
    outputs = torch.randn(aggregator.num_layers * aggregator.num_evaluations + 1, 20, 20, 100).to(dtype)
    output = path(aggregator, outputs)[-1]
    (100 * output.float().square()).sum().backward()
    gradients = [aggregator.get_parameter(key).grad for key in exact]
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
    assert max(gradient.abs().max() for gradient in gradients if gradient is not None) > 65504
    for _ in range(2):
        for key, parameter in aggregator.named_parameters():
            kept = torch.float32 if key in names else dtype
            assert parameter.dtype == kept and (parameter.grad is None or parameter.grad.dtype == kept), key
            assert key not in names or torch.equal(parameter, exact[key]), key
        aggregator.double().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_and_sums_of_transparent_memories_are_of_fp32(dtype):
    decoder = Stack(3, C, side="decoder", other_layers=L)
    memory = shake(Transparent(Stack(L, C, other_layers=3), decoder, dropout=0.0), 1.0)
    exact = memory.weight.detach().clone()
    memory.to(dtype)
    assert torch.equal(memory.weight, exact) and memory.weight.dtype == torch.float32
    outputs = [torch.randn(T, B, C).to(dtype).requires_grad_() for _ in range(L + 1)]
    actual = memory(outputs, [])
    expected = naive_memories.transparent([output.detach().double() for output in outputs], exact.double())
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    # 60,000 in an entry, and 48 entries: the gradient of a logit is beyond what fp16 can hold
    sum((z.float() * 6e4).sum() for z in actual).backward()
    assert memory.weight.grad.dtype == torch.float32 and memory.weight.grad.isfinite().all()
    assert outputs[0].grad.dtype == dtype
    memory.double().to(dtype)
    assert memory.weight.dtype == memory.weight.grad.dtype == torch.float32
