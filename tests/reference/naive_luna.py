"""Luna (Ma et al., 2021): causal linear attention in the plainest form, one position after the other."""

import math

import torch

from .naive_parts import dropped, linear


def softplus(z):
    """log(1 + 2^z) / log 2, which is 1 for 0."""
    return (1 + 2**z).log() / math.log(2)


def causal(x, p, projections, heads):
    """The heads (T x C) for the words *x* of a sentence; projections: "q", "k", "v", and "pq" and "pc" of p and x."""
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
