"""Label-smoothed cross entropy, word by word (Szegedy et al., 2016; as fairseq shares the smoothing out)."""

import torch


def summed(scores, target, smoothing, padding):
    """The loss and the negative log likelihood, summed over positions.

    Args:
        scores: N x V
        target: N
        smoothing: the right word has a share of 1 - smoothing, all others have equal parts of the rest
        padding: the word of positions that do not count
    """
    loss, nll = scores.new_zeros(()), scores.new_zeros(())
    for row, right in zip(scores, target.tolist()):
        if right == padding:
            continue
        probabilities = torch.exp(row) / torch.exp(row).sum()
        nll = nll - torch.log(probabilities[right])
        for word in range(len(row)):
            share = 1 - smoothing if word == right else smoothing / (len(row) - 1)
            loss = loss - share * torch.log(probabilities[word])
    return loss, nll
