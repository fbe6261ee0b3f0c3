"""Decoder memories in the plainest form: every sum, every matrix and every search written out."""

import torch

from .naive_parts import sigmoid, softmax


def transparent(outputs, logits):
    """z_1 ... z_M (Bapna et al., 2018) from y_0 ... y_L and the logits, M x (L+1)."""
    return [sum(share * output for share, output in zip(softmax(row), outputs)) for row in logits]


def nearest_layer(number, count, depth):
    """Of 1 ... depth the layer nearest to depth * number / count, of two the upper; compared without rounding."""
    best = 1
    for layer in range(1, depth + 1):
        if abs(layer * count - number * depth) <= abs(best * count - number * depth):
            best = layer
    return best


def layerwise(outputs, count):
    """The y_i that each of *count* decoder layers attends to."""
    return [outputs[nearest_layer(number, count, len(outputs) - 1)] for number in range(1, count + 1)]


def gru(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """h' of a GRU: the matrices have the rows of reset gate, update gate and candidate."""

    def part(weight, bias, vector, index):
        rows = slice(index * h.size(-1), (index + 1) * h.size(-1))
        return vector @ weight[rows].T + bias[rows]

    reset = sigmoid(part(weight_ih, bias_ih, x, 0) + part(weight_hh, bias_hh, h, 0))
    update = sigmoid(part(weight_ih, bias_ih, x, 1) + part(weight_hh, bias_hh, h, 1))
    candidate = torch.tanh(part(weight_ih, bias_ih, x, 2) + reset * part(weight_hh, bias_hh, h, 2))
    return candidate - update * candidate + update * h


def msc(y_0, layers, blocks, cell, context_norms, memory_norms):
    """y_L and the memories of MSC (our form of Wei et al., 2020).

    layers: functions; cell: the four tensors of :func:`gru`; norms: functions
    """
    size = len(layers) // blocks
    x, context, sums = y_0, y_0, []
    for block in range(blocks):
        for layer in layers[block * size : (block + 1) * size]:
            x = layer(x + context_norms[block](context))
        context = gru(x, context, *cell)
        sums.append(x + context)
    count = len(memory_norms)
    chosen = [sums[nearest_layer(number, count, blocks) - 1] for number in range(1, count + 1)]
    return x, [norm(z) for z, norm in zip(chosen, memory_norms)]
