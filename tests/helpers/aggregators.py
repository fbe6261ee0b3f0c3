"""Aggregators alone, over layers that are small functions, and their comparison with equations."""

import torch

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.stack import MethodConfig, Stack
from tests.helpers.tensors import DOUBLE, assert_same, shake

T, B, C = 3, 2, 12
NEAR = {"rtol": 1e-7, "atol": 1e-9}


def make(name, layers, dim, norm="pre", side="encoder", stack=(), **options):
    """The aggregator *name* of a stack with that depth and width; *stack*: more of its attributes."""
    method = MethodConfig(name, AGGREGATORS.get(name), options)
    return method.build(Stack(layers, dim, norm == "pre", side, aggregator=method, **dict(stack)))


def read_path(aggregator, y_0, layers):
    """What each layer reads, and the output, as the loop of a stack has them."""
    state, path = aggregator.start(y_0), []
    for index, layer in enumerate(layers):
        x, outputs = aggregator.read(state, index), []
        for _ in range(aggregator.num_evaluations):
            outputs.append(layer(aggregator.next_input(x, outputs)))
        state = aggregator.write(state, index, aggregator.combine(x, outputs))
        path.append(x)
    return [*path, aggregator.finish(state)]


def run(aggregator, y_0, layers):
    """The output alone."""
    return read_path(aggregator, y_0, layers)[-1]


def make_layers(count, dim, dtype=torch.float64):
    return [torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Tanh()).to(dtype) for _ in range(count)]


def check_equation(name, equation, depth=5, norm="pre", side="encoder", **options):
    """Compare an aggregator with *equation*, with and without autograd: outputs, and all gradients.

    Args:
        equation: function of the aggregator, y_0 and the layers; returns the output, or first the layers' inputs
    """
    aggregator = shake(make(name, depth, C, norm, side, **options).double())
    layers, y_0 = make_layers(aggregator.num_layers, C), torch.randn(T, B, C, **DOUBLE).requires_grad_()
    expected = torch.stack(equation(aggregator, y_0, layers))
    actual = torch.stack(read_path(aggregator, y_0, layers)[-len(expected) :])
    named = {"y_0": y_0, **dict(aggregator.named_parameters())}
    named.update({f"layer {index}": p for index, layer in enumerate(layers) for p in layer.parameters()})
    assert_same(actual, expected, named, name == "dlcl", **NEAR)  # a softmax over one entry, norms out of the window
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(read_path(aggregator, y_0, layers)[-len(expected) :]), expected, **NEAR)
