"""Residual connections r(x, F(x), bottom) of one sub-layer in the plainest form; matrices have a row per output."""

import math

import torch

from .naive_attention import sigmoid
from .naive_dlcl import layer_norm


def tanh(value):
    return (torch.exp(value) - torch.exp(-value)) / (torch.exp(value) + torch.exp(-value))


def plain(x, f, bottom):
    return x + f


def sdu(w_1, b_1, w_2, b_2, psi):
    return lambda x, f, bottom: x + f + psi(x @ w_1.T + b_1) * (x @ w_2.T + b_2)


def highway_gate(w_1, b_1, w_2, b_2):
    def connect(x, f, bottom):
        gate = sigmoid(x @ w_1.T + b_1)
        return (1 - gate) * x + f + gate * (x @ w_2.T + b_2)

    return connect


def gated_attention(w_1, b_1, w_2, b_2):
    def connect(x, f, bottom):
        gate = sigmoid(x @ w_1.T + b_1)
        return x + (1 - gate) * f + gate * (x @ w_2.T + b_2)

    return connect


def bottom_to_top(last):
    return lambda x, f, bottom: x + f + (bottom if last else 0)


def peri(gain, bias):
    return lambda x, f, bottom: x + layer_norm(f, gain, bias)


def weighted(share):
    return lambda x, f, bottom: x + share * f


def grown(update, last):
    """The size of a branch in the update with that number, from 1; *last*: T."""
    return update / last if update < last else 1.0


def reads_scaled(function, layer):
    """F(z / sqrt(l))."""
    return lambda z: function(z / math.sqrt(layer))
