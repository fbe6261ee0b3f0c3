"""Residual connections r(x, F(x), bottom) of one sub-layer in the plainest form.

Connections act on a list of C features; matrices stand on the left of column vectors.
"""

import math

import torch

from .naive_attention import sigmoid


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


def each_feature(connect, x, f, bottom):
    """The connection of tensors T x B x C, whose features are the C numbers."""
    return torch.stack(connect(x.unbind(-1), f.unbind(-1), bottom.unbind(-1)), dim=-1)
