"""Aggregators alone, over layers that are small functions."""

import torch


def run(aggregator, y_0, layers):
    """As the loop of a stack does it."""
    state = aggregator.start(y_0)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
    return aggregator.finish(state)


def make_layers(count, dim, dtype=torch.float64):
    return [torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Tanh()).to(dtype) for _ in range(count)]
