"""R-Drop, word by word (Liang et al., 2021, Eqs. 2 to 4; the divergence in both directions, halved)."""

import torch

from tests.reference import naive_cross_entropy


def divergence(first, second):
    """KL of two distributions, a sum over words."""
    total = first.new_zeros(())
    for p, q in zip(first, second):
        total = total + p * (torch.log(p) - torch.log(q))
    return total


def summed(first, second, target, smoothing, padding, alpha):
    """The loss, the negative log likelihood of both passes, and the mean divergence, summed over positions.

    Args:
        first, second: N x V, the scores of two passes
        target: N
        alpha: weight of the divergence
    """
    losses = [naive_cross_entropy.summed(scores, target, smoothing, padding) for scores in (first, second)]
    mean = first.new_zeros(())
    for one, two, right in zip(first, second, target.tolist()):
        if right != padding:
            p, q = (torch.exp(row) / torch.exp(row).sum() for row in (one, two))
            mean = mean + (divergence(p, q) + divergence(q, p)) / 2
    return losses[0][0] + losses[1][0] + alpha * mean, losses[0][1] + losses[1][1], mean
