"""Label-smoothed cross entropy (Szegedy et al., 2016; as fairseq shares the smoothing out)."""

import torch


def summed(scores, target, smoothing, padding):
    """The loss and the negative log likelihood, summed over positions.

    Args:
        scores: N x V
        target: N
        smoothing: the right word has a share of 1 - smoothing, all others have equal parts of the rest
        padding: the word of positions that do not count
    """
    words = target != padding
    logs = torch.log_softmax(scores, dim=-1)[words]
    nll = -logs.gather(1, target[words].unsqueeze(1)).sum()
    others = -logs.sum() - nll
    return (1 - smoothing) * nll + smoothing / (scores.size(1) - 1) * others, nll
