"""All aggregators: no state on modules, memory that grows with the number of layers, precision."""

import pytest
import torch

from fairseq_deep.core.aggregators import AGGREGATORS, Aggregator
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make, read_path, run
from tests.helpers.tensors import saved_bytes, shake

T, B, C = 3, 2, 12
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
    layers = [lambda _, y=y: y for y in outputs[1 : aggregator.num_layers + 1]]
    expected = torch.stack(read_path(aggregator, outputs[0], layers))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.stack(read_path(aggregator, outputs[0], layers)), expected)


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
    drawn = iter(outputs[1:])
    output = run(aggregator, outputs[0], [lambda _: next(drawn)] * aggregator.num_layers)
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


def test_the_contract_gives_the_last_evaluation():
    """A method that evaluates a layer several times need not define `combine` or `next_input`."""
    aggregator, x = Aggregator(Stack(2, C)), torch.zeros(T, B, C)
    outputs = [x + 1, x + 2, x + 3]
    assert aggregator.start(x)[0] is x and aggregator.next_input(x, outputs) is x
    assert aggregator.combine(x, outputs) is outputs[2]
