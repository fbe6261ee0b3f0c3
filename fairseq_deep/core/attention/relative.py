"""Relative positions of queries and keys, with a learned vector for each distance.

All queries and keys at one distance share its vector. One product gives the scores of a query at all distances, from
which each key takes its own. The weights of the keys at one distance are summed before their product with its vector.
Both sums over keys, this one and the gradient of the scores, are at least in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_deep.core.keep_fp32 import widened


def find_distances(attention, queries: int, keys: int, beam: int, device: torch.device, place: Tensor | None) -> Tensor:
    """Return the index of the relative vector for each query and key, T x S.

    A position has *beam* keys. The queries are at the last positions, or in a cache of a fixed capacity, at the
    positions of the keys *place*.
    """
    last = keys // beam - 1
    of_key = torch.arange(last + 1, device=device).repeat_interleave(beam)
    if place is None:
        of_query = torch.arange(last + 1 - queries // beam, last + 1, device=device)
    else:
        of_query = torch.div(place[:1], beam, rounding_mode="floor")
    vectors = attention.relative_keys.size(0)
    distances = (of_key - of_query.unsqueeze(1)).clamp(-attention.farthest, vectors - 1 - attention.farthest)
    return distances + attention.farthest


def score_distances(attention, q: Tensor, distances: Tensor) -> Tensor:
    """Return the scores of relative positions (B x H x T x S) of *q* (B x H x T x D) at *distances* (T x S)."""
    scores = torch.matmul(q * attention.head_dim**-0.5, attention.relative_keys.t().to(q.dtype))
    return widened(scores).gather(3, distances.expand(*q.shape[:3], -1)).to(q.dtype)


def relative_values(attention, weights: Tensor, distances: Tensor) -> Tensor:
    """Return sums of the vectors for values (B x H x T x D), with the *weights* of the keys (B x H x T x S)."""
    vectors, wide = attention.relative_values, widened(weights)
    nothing = wide.new_zeros(*weights.shape[:3], len(vectors))
    shares = nothing.scatter_add(3, distances.expand(*weights.shape[:3], -1), wide)
    return torch.matmul(shares.to(weights.dtype), vectors.to(weights.dtype))
