"""R-Drop: a penalty on the divergence between two passes with different dropout masks (``--rdrop-alpha``).

R-Drop: Regularized Dropout for Neural Networks, Liang et al., NeurIPS 2021. One forward pass contains the batch twice;
p and q are the distributions of the two copies, CE the label-smoothed cross entropy, a the flag's value. Summed over
the tokens of one copy, the loss is

    L = CE(p) + CE(q) + a (KL(p|q) + KL(q|p)) / 2

With the scores z of p (and likewise for q) and D = log p - log q, a position has

    dKL(p|q)/dz + dKL(q|p)/dz = p (D - KL(p|q)) + p - q

As for the cross entropy, the backward pass overwrites the scores with the gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cross_entropy import chunks, sum_up


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    """Return *sample* with two copies of the batch, one after the other; its counts refer to one copy."""
    twice = {name: torch.cat([value, value]) if torch.is_tensor(value) else value
             for name, value in sample["net_input"].items()}  # fmt: skip
    return {**sample, "net_input": twice, "target": torch.cat([sample["target"]] * 2)}


class RDropLoss(torch.autograd.Function):
    """Loss, negative log likelihood and (KL(p|q) + KL(q|p)) / 2, summed over all positions."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, smoothing: float, padding: int, alpha: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three sums (scalars, in fp32 or better); the negative log likelihood covers both copies.

        Args:
            scores: 2N x V, all positions of the first copy, then all positions of the second
            target: 2N, indices of the reference tokens
            smoothing: e of the cross entropy
            padding: token index of positions to ignore
            alpha: weight of the divergence
        """
        loss, nll, normaliser, hidden = sum_up(ctx, scores, target, smoothing, padding)
        size = len(target) // 2
        divergence = torch.empty_like(normaliser)
        for rows in chunks(scores[:size]):
            log_p, log_q = (_logs(scores, normaliser, part) for part in _pair(rows, size))
            difference = log_p - log_q
            for part, log, sign in zip(_pair(rows, size), (log_p, log_q), (1, -1)):
                divergence[part] = sign * (log.exp() * difference).sum(-1)
        divergence.masked_fill_(hidden, 0)
        mean = divergence.sum() / 2
        ctx.alpha = alpha
        ctx.save_for_backward(scores, target, normaliser, hidden, divergence)
        ctx.mark_non_differentiable(nll, mean)
        return loss + alpha * mean, nll, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Overwrite the scores with their gradient; torch therefore rejects a second backward pass."""
        scores, target, normaliser, hidden, divergence = ctx.saved_tensors
        size, half = len(target) // 2, ctx.alpha / 2
        weight = grad.to(normaliser.dtype).expand_as(normaliser).masked_fill(hidden, 0).unsqueeze(-1)
        for rows in chunks(scores[:size]):
            pair = _pair(rows, size)
            log_p, log_q = (_logs(scores, normaliser, part) for part in pair)
            difference, p, q = log_p - log_q, log_p.exp(), log_q.exp()
            for part, own, other, change in ((pair[0], p, q, difference), (pair[1], q, p, -difference)):
                change = own * (change - divergence[part].unsqueeze(-1)) + own - other
                gradient = own + half * change - ctx.share
                words = target[part].unsqueeze(-1)
                gradient.scatter_add_(-1, words, gradient.new_full(words.shape, -ctx.rest))
                scores[part].copy_(gradient.mul_(weight[part]))
        return scores, None, None, None, None


def _pair(rows: slice, size: int) -> tuple[slice, slice]:
    """Return the slices of the same positions in both copies."""
    return slice(rows.start, min(rows.stop, size)), slice(rows.start + size, min(rows.stop, size) + size)


def _logs(scores: Tensor, normaliser: Tensor, rows: slice) -> Tensor:
    """Return log probabilities of the positions *rows*."""
    return scores[rows].to(normaliser.dtype) - normaliser[rows].unsqueeze(-1)
