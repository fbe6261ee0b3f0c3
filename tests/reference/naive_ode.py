"""The ODE Transformer (Li et al., 2022) in the plainest form: one evaluation after the other."""

import torch

from .naive_parts import linear, sigmoid

# by the number of evaluations: the factors of F_1, F_2, ... in what is added to x for F_2, F_3, ...
ADDED = {1: [], 2: [[1]], 3: [[1 / 2], [-1, 2]], 4: [[1 / 2], [0, 1 / 2], [0, 0, 1]]}
WEIGHTS = {"rk2": [1 / 2, 1 / 2], "rk3": [1 / 6, 4 / 6, 1 / 6], "rk4": [1 / 6, 2 / 6, 2 / 6, 1 / 6]}


def step(aggregator, layer, x, method="rk2", order=2, identity=False):
    """y = x + sum_i b_i F_i for the input *x* (T x B x C) of the function *layer*."""
    count, f = order if method == "ema" else int(method[2]), []
    for factors in [[], *ADDED[count]]:
        z = x + sum(factor * each for factor, each in zip(factors, f))
        f.append(layer(z) if identity else layer(z) - z)
    if method == "rk2-learned":
        gate = sigmoid(linear(torch.cat(f, dim=-1), aggregator.gate))
        weights = [gate, 1 - gate]
    elif method == "rk2-init":
        weights = aggregator.scalars
    elif method == "ema" and order > 1:
        weights = [aggregator.alpha * (1 - aggregator.alpha) ** (count - i) for i in range(1, count + 1)]
    else:
        weights = WEIGHTS.get(method, [1])
    return x + sum(weight * each for weight, each in zip(weights, f, strict=True))
