"""Depth-wise LSTM and RNN (Xu et al., 2024, Eq. 1-8) and attention, in the plainest form: one thing after the other.

Parameters are given by the names of the equations, as matrices that stand on the left of column vectors; LN_x is the
pair (gain, bias) of a layer norm.
"""

import math

import torch

from .naive_dlcl import layer_norm


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


GLU = {"sigmoid": sigmoid, "gelu": gelu, "swish": lambda x: x * sigmoid(x), "relu": lambda x: x * (x > 0)}


def hidden(c, step, glu):
    """Eq. (5), or Eq. (6) where there is a W_h2."""
    x = layer_norm(c @ step["W_h1"].T + step.get("b_h1", 0), *step["LN_h"])
    if step["W_h2"] is None:
        return gelu(x)
    half = x.size(-1) // 2
    return (x[..., :half] * GLU[glu](x[..., half:])) @ step["W_h2"].T + step.get("b_h2", 0)


def run_step(out, cell, attention, step, glu):
    """Out_i and Cell_i of the parameters *step*; those of an RNN have no gates, and Cell is None."""
    c = torch.cat([out, attention], dim=-1)
    h = hidden(c, step, glu)
    if "W_i" not in step:
        return h, None
    input_gate = sigmoid(layer_norm(c @ step["W_i"].T + step.get("b_i", 0), *step["LN_i"]))
    forget_gate = sigmoid(layer_norm(c @ step["W_f"].T + step.get("b_f", 0), *step["LN_f"]))
    output_gate = sigmoid(layer_norm(c @ step["W_o"].T + step.get("b_o", 0), *step["LN_o"]))
    cell = cell * forget_gate + h * input_gate
    return cell * output_gate, cell


def run_encoder(embedding, attentions, steps, glu="sigmoid", final_norm=None):
    """Output of a stack of the functions *attentions* (the input of a layer -> A_i)."""
    out = cell = embedding
    for attention, step in zip(attentions, steps):
        out, cell = run_step(out, cell, attention(out), step, glu)
    return out if final_norm is None else layer_norm(out, *final_norm)


def run_decoder(
    embedding, attentions, steps, merge="add", glu="sigmoid", attn_residual=True, final_norm=None
):
    """The same for pairs of functions (self-attention, attention to the source); "two" takes two *steps* a layer."""
    steps = iter(steps)
    out = cell = embedding
    for attend_to_self, attend_to_source in attentions:
        s = attend_to_self(out)
        if merge == "two":
            out, cell = run_step(out, cell, s, next(steps), glu)
            out, cell = run_step(out, cell, attend_to_source(out), next(steps), glu)
            continue
        x = attend_to_source(s + out if attn_residual else s)
        merged = s + x if merge == "add" else torch.cat([s, x], dim=-1)
        out, cell = run_step(out, cell, merged, next(steps), glu)
    return out if final_norm is None else layer_norm(out, *final_norm)


def attention(query, memory, projections, num_heads, visible, relative=None, relative_value=None):
    """Output (T x B x C) and weights (H x B x T x S) of multi-head attention of *query* to *memory* (S x B x any).

    projections: {"q", "k", "v", "out": (matrix, bias or None)}; visible(b, i, j): whether query i of sentence b may see
    key j; relative(i, j), relative_value(i, j): the vectors that are added to key and value j for query i, or None.
    """

    def project(name, x):
        matrix, bias = projections[name]
        return x @ matrix.T if bias is None else x @ matrix.T + bias

    q, k, v = project("q", query), project("k", memory), project("v", memory)
    size = query.size(2) // num_heads
    rows, all_weights = [], torch.zeros(num_heads, query.size(1), len(query), len(memory), dtype=query.dtype)
    for i in range(len(query)):
        sentences = []
        for b in range(query.size(1)):
            heads = []
            for head in range(num_heads):
                part = slice(head * size, (head + 1) * size)
                seen = [j for j in range(len(memory)) if visible(b, i, j)]
                keys = [k[j, b, part] if relative is None else k[j, b, part] + relative(i, j) for j in seen]
                scores = torch.stack([(q[i, b, part] * key).sum() / math.sqrt(size) for key in keys])
                weights = scores.exp() / scores.exp().sum()
                all_weights[head, b, i, seen] = weights.detach()
                own = [v[j, b, part] if relative_value is None else v[j, b, part] + relative_value(i, j) for j in seen]
                heads.append(sum(weight * value for weight, value in zip(weights, own)))
            sentences.append(torch.cat(heads))
        rows.append(torch.stack(sentences))
    return project("out", torch.stack(rows)), all_weights


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
