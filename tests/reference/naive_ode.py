"""The ODE Transformer (Li et al., 2022) in the plainest form: each scheme written out, evaluation after evaluation."""

import torch

from .naive_parts import sigmoid


def step(aggregator, layer, x, method="rk2", order=2, identity=False):
    """y for the input *x* (T x B x C) of the function *layer*."""
    gate, scalars, alpha = aggregator.gate, aggregator.scalars, aggregator.alpha
    method = f"ema{order}" if method == "ema" else method

    def change(z):
        return layer(z) if identity else layer(z) - z

    if method == "ema1":
        return layer(x)
    if method in ("rk2", "rk2-learned", "rk2-init", "ema2"):
        f_1 = change(x)
        f_2 = change(x + f_1)
        if method == "rk2":
            return x + (f_1 + f_2) / 2
        if method == "rk2-init":
            return x + scalars[0] * f_1 + scalars[1] * f_2
        if method == "ema2":
            return x + alpha * (1 - alpha) * f_1 + alpha * f_2
        g = sigmoid(torch.cat([f_1, f_2], dim=-1) @ gate.weight.T + gate.bias)
        return x + g * f_1 + (1 - g) * f_2
    if method in ("rk3", "ema3"):
        f_1 = change(x)
        f_2 = change(x + f_1 / 2)
        f_3 = change(x - f_1 + 2 * f_2)
        if method == "rk3":
            return x + (f_1 + 4 * f_2 + f_3) / 6
        return x + alpha * (1 - alpha) ** 2 * f_1 + alpha * (1 - alpha) * f_2 + alpha * f_3
    f_1 = change(x)
    f_2 = change(x + f_1 / 2)
    f_3 = change(x + f_2 / 2)
    f_4 = change(x + f_3)
    if method == "rk4":
        return x + (f_1 + 2 * f_2 + 2 * f_3 + f_4) / 6
    decay = 1 - alpha
    return x + alpha * decay**3 * f_1 + alpha * decay**2 * f_2 + alpha * decay * f_3 + alpha * f_4
