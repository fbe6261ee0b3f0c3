"""Aggregators alone, over layers that are small functions."""

import torch

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.stack import MethodConfig, Stack


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
