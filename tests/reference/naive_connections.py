"""Residual connections of deep stacks in the plainest form: sub-layer after sub-layer, every formula written out."""

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


def feed_forward_function(w_1, b_1, w_2, b_2, norm=lambda x: x):
    """F of a feed-forward sub-layer; *norm*: a function of its hidden values."""

    def function(x):
        hidden = x @ w_1.T + b_1
        return norm(hidden * (hidden > 0)) @ w_2.T + b_2

    return function
