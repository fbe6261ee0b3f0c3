"""Dynamic DLCL (one-way MUDDFormer) from its equation, one sum after the other."""

import torch

from .naive_lstm import gelu


def mudd(y_0, layers, parameters, eps=1e-6):
    """The inputs x_1 ... x_{L+1}; *parameters*: W_1 (C x (l+1)), W_2 and a for each l."""
    outputs, path = [y_0], [y_0]
    for layer, (w_1, w_2, a) in zip(layers, parameters):
        newest = layer(path[-1])
        outputs.append(newest)
        normed = newest / torch.sqrt((newest**2).mean(-1, keepdim=True) + eps)
        weights = gelu(normed @ w_1) @ w_2 + a
        path.append(sum(weights[..., j : j + 1] * output for j, output in enumerate(outputs)))
    return path
