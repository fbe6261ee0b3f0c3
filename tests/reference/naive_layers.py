"""Attention and feed-forward with the options of layers, position by position and head by head, from the equations."""

import math

import torch


def rms_norm(x, gain, eps=1e-6):
    """RMS(x) of the last dimension (Zhang and Sennrich, 2019, Eq. 4)."""
    mean = sum(x[..., i] ** 2 for i in range(x.size(-1))) / x.size(-1)
    return torch.stack([x[..., i] / (mean + eps).sqrt() * gain[i] for i in range(x.size(-1))], dim=-1)


def rotate(x, position):
    """One head's vector (D) as D/2 complex numbers x_i + x_(i+D/2) j, times exp(j position w_i)."""
    half = x.size(0) // 2
    parts = []
    for i in range(half):
        angle = position * 10000 ** (-2 * i / (2 * half))
        number = torch.complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        parts.append((number.real, number.imag))
    return torch.stack([real for real, _ in parts] + [imag for _, imag in parts])


def attention(module, query, memory, heads, kv_heads, visible, rotary=False, output_norm=None, values=None):
    """Output (T x B x C): *module* has the weights; *visible(b, i, j)* says what a query sees.

    *values* (S x B x C) replace those of *module*.
    """
    values_of = module.v_proj(memory) if values is None else values
    length, batch, width = query.shape
    dim, group = width // heads, heads // kv_heads
    rows = []
    for i in range(length):
        for b in range(batch):
            q = module.q_proj(query[i, b])
            outputs = []
            for h in range(heads):
                own, shared = slice(h * dim, (h + 1) * dim), slice(h // group * dim, (h // group + 1) * dim)
                one = q[own] if module.q_norm is None else rms_norm(q[own], module.q_norm.weight)
                one = rotate(one, i) if rotary else one
                scores, values = [], []
                for j in (j for j in range(memory.size(0)) if visible(b, i, j)):
                    k = module.k_proj(memory[j, b])[shared]
                    k = k if module.k_norm is None else rms_norm(k, module.k_norm.weight)
                    k = rotate(k, j) if rotary else k
                    scores.append((one * k).sum() / dim**0.5)
                    values.append(values_of[j, b][shared])
                weights = torch.stack(scores).exp()
                outputs.append(sum(w * v for w, v in zip(weights / weights.sum(), values)))
            x = torch.cat(outputs)
            if module.gate is not None:
                gate = 1 / (1 + (-(module.gate.weight @ query[i, b])).exp())
                x = x * (gate if gate.size(0) == width else gate.repeat_interleave(dim))
            x = x if output_norm is None else output_norm(x)
            rows.append(module.out_proj(x))
    return torch.stack(rows).view(length, batch, width)


def value_residual(modules, x, heads, kv_heads, visible, rotary=False):
    """Outputs of self-attentions, each of which reads the one below: V' = a V_1 + b V (Zhou et al., 2024)."""
    outputs, first = [], modules[0].v_proj(x)
    for number, module in enumerate(modules):
        values = first
        if number > 0:
            a, b = module.value_residual.weight
            values = a * first + b * module.v_proj(x)
        x = attention(module, x, x, heads, kv_heads, visible, rotary, values=values)
        outputs.append(x)
    return torch.stack(outputs)


def gated_feed_forward(module, x, gate):
    """W_2 (act(W_1 x) * V x) (Shazeer, 2020, Eq. 6)."""
    a, b = x @ module.fc1.weight.t(), x @ module.fc_linear.weight.t()
    if gate == "swiglu":
        a = a / (1 + (-a).exp())
    else:
        a = a * 0.5 * (1 + torch.erf(a / 2**0.5))
    return (a * b) @ module.fc2.weight.t()
