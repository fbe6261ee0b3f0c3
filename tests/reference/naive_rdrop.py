"""R-Drop (Liang et al., 2021, Eqs. 2 to 4; the divergence in both directions, halved)."""

import torch

from tests.reference import naive_cross_entropy


def summed(first, second, target, smoothing, padding, alpha):
    """The loss, the negative log likelihood of both passes, and the mean divergence, summed over positions.

    Args:
        first, second: N x V, the scores of two passes
        target: N
        alpha: weight of the divergence
    """
    losses = [naive_cross_entropy.summed(scores, target, smoothing, padding) for scores in (first, second)]
    p, q = (torch.softmax(scores, dim=-1)[target != padding] for scores in (first, second))
    mean = ((p - q) * (torch.log(p) - torch.log(q))).sum() / 2
    return losses[0][0] + losses[1][0] + alpha * mean, losses[0][1] + losses[1][1], mean
