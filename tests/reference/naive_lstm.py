"""Depth-wise LSTM and RNN (Xu et al., 2024, Eq. 1-8) in the plainest form: one thing after the other.

Parameters are given by the names of the equations, as matrices that stand on the left of column vectors; LN_x is the
pair (gain, bias) of a layer norm.
"""

import math

import torch

from .naive_attention import sigmoid
from .naive_dlcl import layer_norm


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
