"""SSRU (Kim et al., 2019) in the plainest form: one position after the other."""

import torch

from .naive_attention import sigmoid


def ssru(x, words, gate, weight):
    """h of *x* (T x B x C), where *words* (B x T) is false unchanged; gate: (W_f, b_f), weight: W."""
    w_f, b_f = gate
    outputs = []
    for b in range(x.size(1)):
        c, row = torch.zeros_like(x[0, 0]), []
        for t in range(x.size(0)):
            if words[b, t]:
                f = sigmoid(w_f @ x[t, b] + b_f)
                c = f * c + (1 - f) * (weight @ x[t, b])
            row.append(c * (c > 0))
        outputs.append(torch.stack(row))
    return torch.stack(outputs, dim=1)
