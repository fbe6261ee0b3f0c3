"""Stacks of bare sub-layers in the plainest form: ResiDual and Attention Residuals, one sum after the other.

A sub-layer is a function F of its input, with its own norm where the method wants one, and without residual connection.
"""

import torch

from .naive_dlcl import layer_norm


def residual_dual(y_0, sublayers, norms, dual_norm):
    """The outputs x_0 ... x_N and the output of the stack; norms: (gain, bias) of LN_1 ... LN_N."""
    x, r, path = y_0, y_0, [y_0]
    for sublayer, norm in zip(sublayers, norms):
        a = sublayer(x)
        r = r + a
        x = layer_norm(x + a, *norm)
        path.append(x)
    return path, x + layer_norm(r, *dual_norm, eps=1e-7)


def read(sources, query, gain, eps=1e-6):
    """sum_i softmax_i(query . RMSNorm(v_i)) v_i over the list *sources* of v_i."""
    scores = []
    for v in sources:
        rms = torch.sqrt((v * v).mean(-1, keepdim=True) + eps)
        scores.append((v / rms * gain * query).sum(-1, keepdim=True))
    total = sum(score.exp() for score in scores)
    return sum(score.exp() / total * v for score, v in zip(scores, sources))


def attention_residual(y_0, sublayers, queries, gains, block=1):
    """h_1 ... h_{N+1}; the last is the output of the stack. queries, gains: those of h_2 ... h_{N+1}."""
    outputs, path = [], [y_0]
    for sublayer, query, gain in zip(sublayers, queries, gains):
        outputs.append(sublayer(path[-1]))
        blocks = [outputs[start : start + block] for start in range(0, len(outputs), block)]
        path.append(read([y_0, *(sum(members) for members in blocks)], query, gain))
    return path
