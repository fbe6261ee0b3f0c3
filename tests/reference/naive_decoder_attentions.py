"""What takes the place of a decoder's attentions in the plainest form, one position after the other.

Average and merged attention (Zhang et al., 2018, 2019) with the matrix M_a that averages; SSRU; Luna.
"""

import math

import torch

from .naive_attention import attention
from .naive_parts import dropped, feed_forward, linear, sigmoid


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


def ssru(x, words, module):
    """h of SSRU (Kim et al., 2019) for *x* (T x B x C), where *words* (B x T) is false unchanged."""
    outputs = []
    for b in range(x.size(1)):
        c, row = torch.zeros_like(x[0, 0]), []
        for t in range(x.size(0)):
            if words[b, t]:
                f = sigmoid(linear(x[t, b], module.gate))
                c = f * c + (1 - f) * linear(x[t, b], module.input_proj)
            row.append(c * (c > 0))
        outputs.append(torch.stack(row))
    return torch.stack(outputs, dim=1)


def softplus(z):
    """log(1 + 2^z) / log 2, which is 1 for 0."""
    return (1 + 2**z).log() / math.log(2)


def causal(x, p, projections, heads):
    """The heads (T x C) of Luna's causal attention (Ma et al., 2021) for the words *x* of a sentence.

    projections: "q", "k", "v", "pq" of p, and "pc" of x
    """
    size, outputs = x.size(-1) // heads, []
    q, k, v, c, pq = (linear(p if name == "pq" else x, projections[name]) for name in ("q", "k", "v", "pc", "pq"))
    for head in range(heads):
        own, rows = slice(head * size, (head + 1) * size), []
        keys, values = torch.zeros(size, len(p)).to(x), torch.zeros(len(p), size).to(x)
        for t in range(len(x)):
            alpha = softplus(torch.stack([(pq[j, own] * c[t, own]).sum() / math.sqrt(size) for j in range(len(p))]))
            alpha = dropped(alpha, "attention_dropout")
            keys = keys + torch.outer(k[t, own], alpha)
            values = values + torch.outer(alpha, v[t, own])
            scores = (q[t, own] @ keys / (t + 1) / math.sqrt(size)).exp()
            rows.append(dropped(scores / scores.sum(), "attention_dropout") @ values / (t + 1))
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=-1)
