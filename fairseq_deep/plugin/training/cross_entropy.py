"""Label-smoothed cross entropy with one copy of the scores.

Rethinking the Inception Architecture for Computer Vision, Szegedy et al., CVPR 2016, as fairseq has it. With the scores
z of V words, the right word y, the smoothing e and e' = e / (V - 1), a position has

    loss       (1 - e - e') (lse(z) - z_y) + e' (V lse(z) - sum z),    lse(z) = log sum exp z
    gradient   softmax(z) - e' - (1 - e - e') [y]

fairseq keeps z, log softmax z and, in the backward pass, three more tensors of their size. Here the forward pass keeps
lse(z), and the backward pass writes the gradient where z is.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNKS = {"cpu": 2**18}
"""Scores that are looked at in one go: on a CPU, what its cache holds."""
CHUNK = 2**25
"""The same elsewhere: what is computed on the way takes no more memory than this."""


class SmoothedCrossEntropy(torch.autograd.Function):
    """The loss and the negative log likelihood, summed over all positions; the backward pass overwrites the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, smoothing: float, padding: int) -> tuple[Tensor, Tensor]:
        """Sum up (two scalars, in fp32 at least).

        Args:
            scores: N x V, of what needs them no more in its own backward pass, as a linear layer
            target: N, the right words
            smoothing: e
            padding: the word of positions that do not count
        """
        loss, nll, normaliser, hidden = sum_up(ctx, scores, target, smoothing, padding)
        ctx.save_for_backward(scores, target, normaliser, hidden)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the scores, in their memory; a second backward pass is an error, as torch sees the change."""
        scores, target, normaliser, hidden = ctx.saved_tensors
        # with the scale of the loss before it is rounded: most probabilities are tiny, in fp16 some would become zero
        weight = grad.to(normaliser.dtype).expand_as(normaliser).masked_fill(hidden, 0).unsqueeze(-1)
        for rows in chunks(scores):
            part = scores[rows]
            gradient = part if part.dtype == normaliser.dtype else part.to(normaliser.dtype)
            gradient.sub_(normaliser[rows].unsqueeze(-1)).exp_().sub_(ctx.share)
            words = target[rows].unsqueeze(-1)
            gradient.scatter_add_(-1, words, gradient.new_full(words.shape, -ctx.rest)).mul_(weight[rows])
            if gradient is not part:
                part.copy_(gradient)
        return scores, None, None, None


def sum_up(ctx: Any, scores: Tensor, target: Tensor, smoothing: float, padding: int) -> tuple[Tensor, ...]:
    """The loss, the negative log likelihood, lse(z) of each position, and which positions do not count.

    Sets ``ctx.share``, e', and ``ctx.rest``, 1 - e - e'.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    normaliser, right, total = (torch.empty(len(target), dtype=dtype, device=scores.device) for _ in range(3))
    for rows in chunks(scores):
        part = scores[rows].to(dtype)
        normaliser[rows] = torch.logsumexp(part, -1)
        right[rows] = part.gather(-1, target[rows].unsqueeze(-1)).squeeze(-1)
        total[rows] = part.sum(-1)
    hidden, words = target.eq(padding), scores.size(-1)
    nll = (normaliser - right).masked_fill_(hidden, 0).sum()
    even = (words * normaliser - total).masked_fill_(hidden, 0).sum()
    ctx.share = smoothing / (words - 1)
    ctx.rest = 1 - smoothing - ctx.share
    return ctx.rest * nll + ctx.share * even, nll, normaliser, hidden


def chunks(scores: Tensor) -> Iterator[slice]:
    """Rows that are looked at in one go."""
    size = max(1, CHUNKS.get(scores.device.type, CHUNK) // scores.size(-1))
    for start in range(0, len(scores), size):
        yield slice(start, start + size)
