"""Attention of the few queries of a decoding step, on a CPU: as few passes over memory as plain products allow."""

from typing import Optional

import torch
from torch import Tensor


def attend_step(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v, without gradients, in fp32.

    Args:
        q: B x H x T x D
        k, v: B x H x S x D
        bias: added to the scores, B x 1 x 1 or T x S

    Returns:
        B x H x T x D
    """
    batch, heads, length, dim = q.shape
    keys = k.flatten(0, 1).transpose(1, 2)
    nothing = torch.empty(1, 1, 1, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(nothing, q.reshape(batch * heads, length, dim), keys, beta=0.0, alpha=dim**-0.5)
    if bias is not None:
        scores.view(batch, heads, length, -1).add_(bias)
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(batch, heads, length, dim)


def by_column(k: Tensor) -> Tensor:
    """Keys (B x H x S x D) that many steps attend to, laid out as their products want them: on a CPU, as D x S."""
    return k.contiguous() if k.is_cuda else k.transpose(2, 3).contiguous().transpose(2, 3)


def select_sources(k: Tensor, sources: Tensor) -> Tensor:
    """The keys of some *sources*, in the layout that they have."""
    columns = k.transpose(2, 3)
    return columns.index_select(0, sources).transpose(2, 3) if columns.is_contiguous() else k.index_select(0, sources)
