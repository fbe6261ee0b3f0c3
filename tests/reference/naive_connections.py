"""Residual connections of deep stacks in the plainest form: sub-layer after sub-layer, every formula written out."""

import math


def deepnet_alpha(side, n, m):
    return 0.81 * (n**4 * m) ** (1 / 16) if side == "encoder" else (3 * m) ** 0.25


def connect(method, factor):
    """r(x, F(x)) of one sub-layer: its *factor* is alpha (DeepNet), omega (Admin) or a (ReZero)."""
    return {
        "plain": lambda x, f: x + f,
        "deepnet": lambda x, f: factor * x + f,
        "admin": lambda x, f: factor * x + f,
        "rezero": lambda x, f: x + factor * f,
    }[method]


def run_sublayers(x, sublayers, pre_norm):
    """Output of the triples of functions (F, r, LN) in *sublayers*, one on top of the other."""
    for function, residual, normalise in sublayers:
        x = residual(x, function(normalise(x))) if pre_norm else normalise(residual(x, function(x)))
    return x


def feed_forward_function(w_1, b_1, w_2, b_2, norm=lambda x: x):
    """F of a feed-forward sub-layer; *norm*: a function of its hidden values."""

    def function(x):
        hidden = x @ w_1.T + b_1
        return norm(hidden * (hidden > 0)) @ w_2.T + b_2

    return function


def profile(x, sublayers):
    """omega of each of the pairs (F, LN) in *sublayers*: its square is the variance of what the last one added up."""
    omegas, omega = [], 1.0
    for function, normalise in sublayers:
        omegas.append(omega)
        kept, added = omega * x, function(x)
        x = normalise(kept + added)
        omega = math.sqrt(sum(float(((part - part.mean()) ** 2).mean()) for part in (kept, added)))
    return omegas
