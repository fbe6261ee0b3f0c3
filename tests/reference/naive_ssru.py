"""SSRU (Kim et al., 2019) in the plainest form: one position after the other."""

import torch

from .naive_parts import linear, sigmoid


def ssru(x, words, module):
    """h of *x* (T x B x C), where *words* (B x T) is false unchanged."""
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
