"""Average and merged attention (Zhang et al., 2018, 2019) in the plainest form, with the matrix M_a that averages."""

import torch

from .naive_attention import attention, sigmoid
from .naive_dropout import dropped


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


def average_attention(x, mask, gate, ffn=None):
    """h of *x*; gate: (W, b); ffn: (W_1, b_1, W_2, b_2) or None."""
    g = mean(x, mask)
    if ffn is not None:
        w_1, b_1, w_2, b_2 = ffn
        hidden = g @ w_1.T + b_1
        g = dropped(hidden * (hidden > 0), "activation_dropout") @ w_2.T + b_2
    weight, bias = gate
    gates = sigmoid(torch.cat([x, g], dim=-1) @ weight.T + bias)
    width = x.size(-1)
    return gates[..., :width] * x + gates[..., width:] * g


def merged(x, memory, projections, num_heads, visible, mask, norm=lambda x: x):
    """MATT(x), Eq. (17), and the weights of the memory's words.

    Heads of the memory and M_a (x W_v + b_v) go together through W_o, after Sub-LN's *norm*.

    projections, visible: see :func:`naive_attention.attention`.
    """
    heads = {**projections, "out": (torch.eye(x.size(-1)).to(x), None)}
    o, weights = attention(x, memory, heads, num_heads, visible)
    (w_v, b_v), (w_o, b_o) = projections["v"], projections["out"]
    values = x @ w_v.T if b_v is None else x @ w_v.T + b_v
    output = norm(o + mean(values, mask)) @ w_o.T
    return (output if b_o is None else output + b_o), weights
