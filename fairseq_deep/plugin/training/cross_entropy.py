"""Label-smoothed cross entropy with one copy of the scores.

Rethinking the Inception Architecture for Computer Vision, Szegedy et al., CVPR 2016, as fairseq has it. With the scores
z of V words, the right word y, the smoothing e and e' = e / (V - 1), a position has

    loss       (1 - e - e') (lse(z) - z_y) + e' (V lse(z) - sum z),    lse(z) = log sum exp z
    gradient   softmax(z) - e' - (1 - e - e') [y]

fairseq stores z, log softmax z and, in the backward pass, three more tensors of this size. Here the forward pass stores
lse(z), and the backward pass overwrites z with the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNKS = {"cpu": 2**18}
"""Number of scores processed at once: on a CPU, as many as fit into its cache."""
CHUNK = 2**25
"""Number of scores processed at once on other devices; it limits the memory of intermediate results."""


class SmoothedCrossEntropy(torch.autograd.Function):
    """Loss and negative log likelihood, summed over all positions; the backward pass overwrites the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, smoothing: float, padding: int) -> tuple[Tensor, Tensor]:
        """Return both sums (scalars, in fp32 or better).

        Args:
            scores: N x V, output of a layer that does not need it in its backward pass, such as a linear layer
            target: N, indices of the reference tokens
            smoothing: e
            padding: token index of positions to ignore
        """
        loss, nll, normaliser, hidden = sum_up(ctx, scores, target, smoothing, padding)
        ctx.save_for_backward(scores, target, normaliser, hidden)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        """Overwrite the scores with their gradient; torch therefore rejects a second backward pass."""
        scores, target, normaliser, hidden = ctx.saved_tensors
        # multiply by the loss scale before rounding: most probabilities are tiny, and some would underflow in fp16
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
    """Return the loss, the negative log likelihood, lse(z) per position, and a mask of ignored positions.

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
    """Yield slices of rows to process at once."""
    size = max(1, CHUNKS.get(scores.device.type, CHUNK) // scores.size(-1))
    for start in range(0, len(scores), size):
        yield slice(start, start + size)
