"""Depth-wise LSTM and RNN (Xu et al., 2024, Eq. 1-8) in the plainest form: one thing after the other."""

import torch

from .naive_parts import dropped, gelu, layer_norm, linear, norm, sigmoid

GLU = {"sigmoid": sigmoid, "gelu": gelu, "swish": lambda x: x * sigmoid(x), "relu": lambda x: x * (x > 0)}


def hidden(c, module, glu):
    """Eq. (5), or Eq. (6) where there is a second matrix."""
    x = norm(module.layer_norm)(linear(c, module.fc1))
    if module.fc2 is None:
        return gelu(x)
    half = x.size(-1) // 2
    return linear(dropped(x[..., :half] * GLU[glu](x[..., half:]), "activation_dropout"), module.fc2)


def run_step(out, cell, attention, step, glu, dropout):
    """Out_i and Cell_i of the modules *step*, of h and of gates; an RNN has no gates, and Cell is None."""
    c, (network, gates) = torch.cat([out, attention], dim=-1), step
    h = hidden(c, network, glu)
    h = dropped(h) if dropout is None else (1 + dropout) * h
    if gates is None:
        return h, None
    size = h.size(-1)
    i, f, o = (sigmoid(layer_norm(linear(c, gates, slice(row * size, (row + 1) * size)), *affine))
               for row, affine in enumerate(zip(gates.norm_weight, gates.norm_bias)))  # fmt: skip
    cell = cell * f + h * i
    return cell * o, cell


def steps_of(aggregator, share, places):
    """The modules of all steps, of h and of gates, for the sharing mode and the number of steps (*places*) a layer."""
    for number in range(aggregator.num_layers):
        network, gates = (number % places if shared else number for shared in (share == "all", share != "none"))
        yield aggregator.hidden[network], aggregator.gates[gates] if len(aggregator.gates) else None


def run_stack(out, layers, steps, attn_residual, merge="add", glu="sigmoid", dropout=None):
    """Output of a stack: a layer is its attention, or self-attention and attention to the source, as functions.

    "two" takes two *steps* a layer. dropout: the method's own instead of the model's
    """
    steps, cell = iter(steps), out
    for attend, *to_source in layers:
        a = attend(out)
        for source in to_source:
            if merge == "two":
                out, cell = run_step(out, cell, a, next(steps), glu, dropout)
                a = source(out)
            else:
                x = source(a + out if attn_residual else a)
                a = a + x if merge == "add" else torch.cat([a, x], dim=-1)
        out, cell = run_step(out, cell, a, next(steps), glu, dropout)
    return out
