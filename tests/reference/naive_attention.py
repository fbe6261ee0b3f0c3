"""Attention with all options of layers, query by query and head by head."""

import functools
import math

import torch

from .naive_parts import dropped, linear, rms_norm, sigmoid


def rotate(x, position):
    """One head's vector (D) as D/2 complex numbers x_i + x_(i+D/2) j, times exp(j position w_i)."""
    half = x.size(0) // 2
    parts = []
    for i in range(half):
        angle = position * 10000 ** (-2 * i / (2 * half))
        number = torch.complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        parts.append((number.real, number.imag))
    return torch.stack([real for real, _ in parts] + [imag for _, imag in parts])


def attention(query, memory, projections, num_heads, visible, relative=None, relative_value=None, options=None):
    """Output (T x B x C) and weights (H x B x T x S) of multi-head attention of *query* to *memory* (S x B x any).

    projections: {"q", "k", "v", "out": module}; visible(b, i, j): whether query i of sentence b may see
    key j; relative(i, j), relative_value(i, j): the vectors that are added to key and value j for query i, or None;
    options: "q_norm" and "k_norm" (gains), "rotary", "gate" (a matrix), "output_norm" (a function), "values" (S x B x
    C instead of those of the projection). Keys and values may have fewer heads, each for a group of queries.
    """

    def place(x, name, position):
        gain = options.get(f"{name}_norm")
        x = x if gain is None else rms_norm(x, gain)
        return rotate(x, position) if options.get("rotary") else x

    @functools.cache
    def key(j, b, head):
        return place(k[j, b, shared(head)], "k", j)

    def shared(head):
        return slice(head // group * size, (head // group + 1) * size)

    options = options or {}
    q, k, v = linear(query, projections["q"]), linear(memory, projections["k"]), options.get("values")
    v = linear(memory, projections["v"]) if v is None else v
    size = query.size(2) // num_heads
    group = num_heads * size // k.size(2)
    rows, all_weights = [], torch.zeros(num_heads, query.size(1), len(query), len(memory), dtype=query.dtype)
    for i in range(len(query)):
        sentences = []
        for b in range(query.size(1)):
            heads = []
            for head in range(num_heads):
                part = slice(head * size, (head + 1) * size)
                seen = [j for j in range(len(memory)) if visible(b, i, j)]
                keys = [key(j, b, head) if relative is None else key(j, b, head) + relative(i, j) for j in seen]
                one = place(q[i, b, part], "q", i)
                scores = torch.stack([(one * each).sum() / math.sqrt(size) for each in keys])
                weights = scores.exp() / scores.exp().sum()
                all_weights[head, b, i, seen] = weights.detach()
                own = [v[j, b, shared(head)] for j in seen]
                own = own if relative_value is None else [each + relative_value(i, j) for each, j in zip(own, seen)]
                heads.append(sum(dropped(weight, "attention_dropout") * value for weight, value in zip(weights, own)))
            x = torch.cat(heads)
            if options.get("gate") is not None:
                gate = sigmoid(options["gate"] @ query[i, b])
                x = x * (gate if len(gate) == len(x) else gate.repeat_interleave(size))
            sentences.append(x if options.get("output_norm") is None else options["output_norm"](x))
        rows.append(torch.stack(sentences))
    return linear(torch.stack(rows), projections["out"]), all_weights


def relative_vector(table, clip, causal):
    """The function relative(i, j) of :func:`attention`, for a table of the vectors of the distances j - i.

    Both ways: distances from -clip to clip, farther ones taken for these. Causal: -clip to 0, and one vector, the
    first, for all that is farther.
    """

    def relative(i, j):
        distance = j - i
        if causal:
            return table[0] if distance < -clip else table[1 + clip + distance]
        return table[clip + min(max(distance, -clip), clip)]

    return relative
