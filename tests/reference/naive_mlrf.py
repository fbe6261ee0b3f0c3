"""Multi-layer representation fusion (Wang et al., 2018): one layer after the other.

Parameters are given by the names of the equations, as matrices that stand on the left of column vectors; W_1 and W_2 of
"multi-hop" stand on the right of row vectors, as in its equation.
"""

import torch

from .naive_dlcl import layer_norm
from .naive_routing import softmax


def mean(y):
    return sum(y) / len(y)


def learned(y, a, normalise):
    w = softmax(list(a)) if normalise else list(a)
    return sum(w[layer] * y[layer] for layer in range(len(y)))


def ffn(y, W_1, b_1, W_2, b_2):
    inner = torch.cat(y, dim=-1) @ W_1.T + b_1
    return (inner * (inner > 0)) @ W_2.T + b_2


def multi_hop(y, W_1, W_2, W):
    scores = [torch.tanh(row @ W_1) @ W_2 for row in y]
    hops = []
    for hop in range(W_2.size(1)):
        shares = softmax([score[..., hop : hop + 1] for score in scores])
        hops.append(sum(shares[layer] * y[layer] for layer in range(len(y))))
    return torch.cat(hops, dim=-1) @ W.T


def fuse(outputs, function, layer_norms=(), final_norm=None):
    """g (T x B x C) of *function* for the list of outputs y_1 ... y_L (each T x B x C).

    layer_norms: (gain, bias) for each y_l in pre-norm; final_norm: that of g in post-norm.
    """
    if layer_norms:
        outputs = [layer_norm(y, *norm) for y, norm in zip(outputs, layer_norms)]
    g = function(outputs)
    return g if final_norm is None else layer_norm(g, *final_norm)
