"""Residual connections r(x, F(x)) of one sub-layer in the plainest form, and layers made of them.

Connections act on one position, a list of C numbers; matrices stand on the left of column vectors.
"""

import math

import torch

from .naive_attention import sigmoid
from .naive_dlcl import layer_norm


def tanh(value):
    return (torch.exp(value) - torch.exp(-value)) / (torch.exp(value) + torch.exp(-value))


def linear(weight, bias, x):
    return [sum(weight[i, j] * x[j] for j in range(len(x))) + bias[i] for i in range(len(bias))]


def plain(x, f, bottom):
    return [a + b for a, b in zip(x, f)]


def sdu(w_1, b_1, w_2, b_2, psi):
    def connect(x, f, bottom):
        gate, value = linear(w_1, b_1, x), linear(w_2, b_2, x)
        return [x[i] + f[i] + psi(gate[i]) * value[i] for i in range(len(x))]

    return connect


def highway_gate(w_1, b_1, w_2, b_2):
    def connect(x, f, bottom):
        gate, value = [sigmoid(a) for a in linear(w_1, b_1, x)], linear(w_2, b_2, x)
        return [(1 - gate[i]) * x[i] + f[i] + gate[i] * value[i] for i in range(len(x))]

    return connect


def gated_attention(w_1, b_1, w_2, b_2):
    def connect(x, f, bottom):
        gate, value = [sigmoid(a) for a in linear(w_1, b_1, x)], linear(w_2, b_2, x)
        return [x[i] + (1 - gate[i]) * f[i] + gate[i] * value[i] for i in range(len(x))]

    return connect


def bottom_to_top(last):
    def connect(x, f, bottom):
        return [x[i] + f[i] + (bottom[i] if last else 0) for i in range(len(x))]

    return connect


def peri(gain, bias, eps=1e-5):
    def connect(x, f, bottom):
        mean = sum(f) / len(f)
        deviation = (sum((a - mean) ** 2 for a in f) / len(f) + eps) ** 0.5
        return [x[i] + (f[i] - mean) / deviation * gain[i] + bias[i] for i in range(len(x))]

    return connect


def layerscale(factors):
    def connect(x, f, bottom):
        return [x[i] + factors[i] * f[i] for i in range(len(x))]

    return connect


def layerscale_start(depth):
    for deepest, start in ((18, 0.1), (24, 1e-5), (math.inf, 1e-6)):
        if depth <= deepest:
            return start


def weighted(share):
    def connect(x, f, bottom):
        return [x[i] + share * f[i] for i in range(len(x))]

    return connect


def grown(update, last):
    """The size of a branch in the update with that number, from 1; *last*: T."""
    return update / last if update < last else 1.0


def branchnorm(update, last):
    return weighted(grown(update, last))


def completep(depth, base, exponent=1):
    return weighted(1 / (depth / base) ** exponent)


def prores(update, period, layer, factor=1):
    return weighted(grown(update, period * layer) * factor)


def reads_scaled(function, layer):
    """F(z / sqrt(l))."""
    return lambda z: function(z / math.sqrt(layer))


def each_position(connect, x, f, bottom):
    """The connection at every position of T x B x C."""
    rows = []
    for t in range(x.size(0)):
        row = [connect(list(x[t, b]), list(f[t, b]), list(bottom[t, b])) for b in range(x.size(1))]
        rows.append(torch.stack([torch.stack(position) for position in row]))
    return torch.stack(rows)


def run_layer(x, sublayers, pre_norm):
    """Output of a layer with the triples (F, connection, LN) in *sublayers*."""
    bottom = x
    for function, connect, norm in sublayers:
        if pre_norm:
            x = each_position(connect, x, function(layer_norm(x, *norm)), bottom)
        else:
            x = layer_norm(each_position(connect, x, function(x), bottom), *norm)
    return x
