"""Luna (Ma et al., 2021) in the plainest form: one sentence without padding, one position after the other.

A sequence is T x 1 x C; projections: {name: (matrix, bias or None)}; norms: (gain, bias).
"""

import math

import torch

from .naive_attention import attention
from .naive_dlcl import layer_norm


def sinusoids(length, width):
    """Features of the positions 0 ... *length* - 1."""
    rows = []
    for j in range(length):
        angles = [j * 10000 ** (-i / (width // 2 - 1)) for i in range(width // 2)]
        rows.append([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
    return torch.tensor(rows, dtype=torch.float64)


def start(weight, positions, words):
    """p of a sentence with so many *words*: a row for each, up to all."""
    rows = [math.sqrt(weight.size(1)) * weight[j] + positions[j] for j in range(min(len(weight), words))]
    return torch.stack(rows).unsqueeze(1)


def everything(b, i, j):
    return True


def pack(p, x, projections, heads):
    """p~: the heads of p's attention to x."""
    identity = {"out": (torch.eye(x.size(-1)).to(x), None)}
    return attention(p, x, {**projections, **identity}, heads, everything)[0]


def unpack(x, packed, projections, heads):
    """a: x's attention to p~."""
    return attention(x, packed, projections, heads, everything)[0]


def softplus(z):
    """log(1 + 2^z) / log 2, which is 1 for 0."""
    return (1 + 2**z).log() / math.log(2)


def causal(x, p, projections, heads):
    """The causal linear attention; projections: "q", "k", "v", "out", and "pq" and "pc" of p and x."""

    def project(name, rows):
        matrix, bias = projections[name]
        return rows @ matrix.T if bias is None else rows @ matrix.T + bias

    size, outputs = x.size(-1) // heads, []
    q, k, v, c, pq = *(project(name, x[:, 0]) for name in ("q", "k", "v", "pc")), project("pq", p[:, 0])
    for head in range(heads):
        own, rows = slice(head * size, (head + 1) * size), []
        keys, values = torch.zeros(size, len(p)).to(x), torch.zeros(len(p), size).to(x)
        for t in range(len(x)):
            alpha = softplus(torch.stack([(pq[j, own] * c[t, own]).sum() / math.sqrt(size) for j in range(len(p))]))
            keys = keys + torch.outer(k[t, own], alpha)
            values = values + torch.outer(alpha, v[t, own])
            scores = (q[t, own] @ keys / (t + 1) / math.sqrt(size)).exp()
            rows.append(scores / scores.sum() @ values / (t + 1))
        outputs.append(torch.stack(rows))
    return project("out", torch.cat(outputs, dim=-1)).unsqueeze(1)


def encoder_layer(p, x, layer, pre_norm):
    """p' and x'; *layer*: "pack" and "unpack" (functions), "ffn" (a function), norms "p", "x" and "ffn" (or None)."""
    norms = {name: _norm(layer[f"{name}_norm"]) for name in ("p", "x", "ffn")}
    if pre_norm:
        own, above = norms["x"](x), norms["p"](p)
        packed = layer["pack"](above, own)
        x = x + layer["unpack"](own, packed)
        return p + packed, x + layer["ffn"](norms["ffn"](x))
    packed = layer["pack"](p, x)
    x = norms["x"](x + layer["unpack"](x, packed))
    return norms["p"](p + packed), norms["ffn"](x + layer["ffn"](x))


def memories(p, x, layers, pre_norm):
    """The pairs p_j, p~_j of the decoder's *layers*: (a function that packs, a norm or None)."""
    found = []
    for packs, norm in layers:
        packed = packs(_norm(norm)(p) if pre_norm else p, x)
        found.append((p, packed))
        p = p + packed if pre_norm else _norm(norm)(p + packed)
    return found


def _norm(affine):
    return (lambda x: x) if affine is None else (lambda x: layer_norm(x, *affine))
