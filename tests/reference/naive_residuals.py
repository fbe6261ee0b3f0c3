"""Residual connections r(x, F(x), bottom) of one sub-layer in the plainest form; matrices have a row per output."""

import math

import torch

from .naive_parts import norm, sigmoid

UPDATE = 4  # the number of the update, from 1, in which branches that grow are compared


def tanh(value):
    return (torch.exp(value) - torch.exp(-value)) / (torch.exp(value) + torch.exp(-value))


def plain(x, f, bottom):
    return x + f


def weighted(share):
    return lambda x, f, bottom: x + share * f


def gated(residual, index, name, form="", activation="", **_):
    """SDU and highway connections."""
    (w_1, w_2), (b_1, b_2) = (part.chunk(2) for part in residual.linears[index].parameters())

    def connect(x, f, bottom):
        gate = (tanh if activation == "tanh" else sigmoid)(x @ w_1.T + b_1)
        added = gate * (x @ w_2.T + b_2)
        if name == "sdu":
            return x + f + added
        return x + (1 - gate) * f + added if form == "attention" else (1 - gate) * x + f + added

    return connect


def grown(last):
    """The size of a branch; *last*: T, the update from which it is 1."""
    return UPDATE / last if UPDATE < last else 1.0


def connection(residual, stack, number, index, last):
    """That of a sub-layer, *last* of its layer, in the layer with this *number*, with the weights of *residual*."""
    name, options = stack.residual.name, stack.residual.options
    if name in ("sdu", "highway") and number <= options.get("layers", number):
        return gated(residual, index, name, **options)
    if name == "b2t":
        return lambda x, f, bottom: x + f + (bottom if last else 0)
    if name == "peri":
        return lambda x, f, bottom: x + norm(residual.layer_norms[index])(f)
    if name == "layerscale":
        return weighted(residual.weight[index])
    if name == "completep":
        return weighted((options.get("base", 1.0) / stack.layers) ** options.get("alpha", 1.0))
    if name == "prores":
        factor = 1 / stack.layers if options.get("around") == "completep" else 1
        return weighted(grown(options.get("period", 1000) * number) * factor)
    return weighted(grown(options.get("updates", 4000))) if name == "branchnorm" else plain


def reads_scaled(function, layer):
    """F(z / sqrt(l))."""
    return lambda z: function(z / math.sqrt(layer))
