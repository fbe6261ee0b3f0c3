"""Layer aggregation (Dou et al., 2018) in the plainest form: all layer outputs kept, every sum written out."""

import torch

from tests.reference.naive_dlcl import layer_norm


def aggregate(inputs, node):
    """AGG(u_1, ..., u_n) of the list *inputs*; node: W_1, b_1, W_2, b_2, and gain and bias of the norm."""
    w_1, b_1, w_2, b_2, gain, bias = node
    hidden = torch.cat(inputs, dim=-1) @ w_1.T + b_1
    hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
    total = hidden @ w_2.T + b_2
    for u in inputs:
        total = total + u
    return layer_norm(total, gain, bias)


def hierarchical(y_0, layers, nodes, block=2):
    """o_i merges the *block* layers above o_{i-1} (fewer at the top) and o_{i-1}, and is what layers go on with."""
    x, o = y_0, None
    for i, first in enumerate(range(0, len(layers), block)):
        outputs = []
        for layer in layers[first : first + block]:
            x = layer(x)
            outputs.append(x)
        o = aggregate(outputs if o is None else [*outputs, o], nodes[i])
        x = o
    return x


def iterative(y_0, layers, nodes):
    """A plain stack, above which o_l merges y_l and o_{l-1}."""
    outputs = plain_outputs(y_0, layers)
    o = outputs[0]
    for output, node in zip(outputs[1:], nodes):
        o = aggregate([output, o], node)
    return o


def linear(y_0, layers, matrices):
    """A plain stack, above which each layer's output is multiplied by a matrix of its own."""
    total = 0
    for matrix, output in zip(matrices, plain_outputs(y_0, layers)):
        total = total + output @ matrix.T
    return total


def plain_outputs(y_0, layers):
    """[y_1, ..., y_L] of a plain stack."""
    outputs, x = [], y_0
    for layer in layers:
        x = layer(x)
        outputs.append(x)
    return outputs
