"""DLCL (Wang et al., 2019, Eq. 7-9) in the plainest form: everything kept, every sum written out."""

import torch


def layer_norm(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def combine(outputs, weight, norms, pre_norm, window=None, normalize=False, first_norm=None):
    """G(y_0, ..., y_l) for the list *outputs* of y_k.

    weight: (L+1) x (L+1) x n; norms: [(gain, bias)] of LN_1 ... LN_L, or [] for none; first_norm: (gain, bias) of the
    norm on y_0 or, in post-norm, on the first combination, or None for none.
    """
    last = len(outputs) - 1
    allowed = [k for k in range(last + 1) if window is None or k > last - window]
    scores = torch.stack([weight[last, k] for k in allowed])
    if normalize:
        scores = scores.exp() / scores.exp().sum(0)
    total = 0
    for score, k in zip(scores, allowed):
        entry = outputs[k]
        if pre_norm and k > 0 and norms:
            entry = layer_norm(entry, *norms[k - 1])
        if pre_norm and k == 0 and first_norm is not None:
            entry = layer_norm(entry, *first_norm)
        total = total + entry * score.repeat(entry.size(-1) // score.numel())
    if not pre_norm and last > 0:
        total = layer_norm(total, *norms[last - 1])
    if not pre_norm and last == 0 and first_norm is not None:
        total = layer_norm(total, *first_norm)
    return total
