"""DLCL (Wang et al., 2019, Eq. 7-9) in the plainest form: everything kept, every sum written out."""

import torch


def combine(outputs, weight, norms, pre_norm, window=None, normalize=False):
    """G(y_0, ..., y_l) for the list *outputs* of y_k.

    weight: (L+1) x (L+1) x n; norms: the functions LN_0 ... LN_L, on y_k or, in post-norm, on the combination of row k
    """
    last = len(outputs) - 1
    allowed = [k for k in range(last + 1) if window is None or k > last - window]
    scores = torch.stack([weight[last, k] for k in allowed])
    if normalize:
        scores = scores.exp() / scores.exp().sum(0)
    total = 0
    for score, k in zip(scores, allowed):
        entry = norms[k](outputs[k]) if pre_norm else outputs[k]
        total = total + entry * score.repeat(entry.size(-1) // score.numel())
    return total if pre_norm else norms[last](total)
