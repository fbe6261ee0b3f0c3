"""Average and merged attention (Zhang et al., 2018, 2019) in the plainest form, with the matrix M_a that averages."""

import torch

from .naive_attention import attention
from .naive_parts import feed_forward, linear, sigmoid


def average_mask(words, causal=True):
    """M_a (B x T x T) for *words* (B x T, true where there is one): each row sums to 1, those of padding to 0."""
    size = words.size(1)
    mask = torch.zeros(len(words), size, size, dtype=torch.float64)
    for b in range(len(words)):
        for i in range(size):
            seen = [j for j in range(size) if words[b, j] and (j <= i or not causal)]
            for j in seen if words[b, i] else []:
                mask[b, i, j] = 1 / len(seen)
    return mask


def mean(x, mask):
    """M_a x of *x* (T x B x C)."""
    return torch.stack([mask[b].to(x) @ x[:, b] for b in range(x.size(1))], dim=1)


def average_attention(x, mask, module):
    """h of *x*; the *module* may have a feed-forward network."""
    g = mean(x, mask)
    if module.fc1 is not None:
        g = feed_forward(g, module)
    gates = sigmoid(linear(torch.cat([x, g], dim=-1), module.gate))
    width = x.size(-1)
    return gates[..., :width] * x + gates[..., width:] * g


def merged(x, memory, projections, num_heads, visible, mask, norm=lambda x: x):
    """MATT(x), Eq. (17), and the weights of the memory's words.

    Heads of the memory and M_a (x W_v + b_v) go together through W_o, after Sub-LN's *norm*.

    projections, visible: see :func:`naive_attention.attention`.
    """
    o, weights = attention(x, memory, {**projections, "out": None}, num_heads, visible)
    return linear(norm(o + mean(linear(x, projections["v"]), mask)), projections["out"]), weights
