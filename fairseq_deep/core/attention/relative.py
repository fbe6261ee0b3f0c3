"""Relative positions of whole sentences, as a skewed view of the scores of all distances.

Each query has T keys at T distances, which differ between queries. One product computes the scores of all distances
-T ... T-1, in rows of 2T. The scores of the keys are the same numbers viewed with rows of 2T-1 (as in Music
Transformer, Huang et al., 2019, Section 3.4.1). This needs no gather, and the backward pass needs one copy instead of a
scatter.
"""

import torch
from torch import Tensor

from fairseq_deep.core.compat import is_compiling


def all_distances(vectors: Tensor, farthest: int, length: int) -> Tensor:
    """Return the vectors of the distances -length ... length-1, clipped: 2T x D.

    Args:
        vectors: one for each distance from -farthest on, R x D with R > 1; the ends also represent larger distances
        farthest: number of distances before 0
        length: T
    """
    rows = vectors.size(0)
    if is_compiling() and not torch.is_grad_enabled():  # one graph for all lengths
        distances = torch.arange(-length, length, device=vectors.device).clamp(-farthest, rows - 1 - farthest)
        return vectors.index_select(0, distances + farthest)
    first, middle, last = vectors.split([1, rows - 2, 1])
    before, after = length - farthest + 1, length - (rows - 1 - farthest)  # repetitions of the ends
    if before < 0 or after < 0:
        middle = middle[max(-before, 0) : rows - 2 - max(-after, 0)]
    return torch.cat([first.expand(max(before, 0), -1), middle, last.expand(max(after, 0), -1)])


def relative_scores(q: Tensor, vectors: Tensor) -> Tensor:
    """Multiply queries (B x H x T x D) by the vectors of :func:`all_distances`, for each key: B x H x T x T."""
    batch, heads, length = q.size(0), q.size(1), q.size(2)
    scores = torch.matmul(q.permute(2, 0, 1, 3), vectors.t())  # T x B x H x 2T, the memory layout of projections
    row = scores.size(3)
    strides = [heads * row, row, batch * heads * row - 1, 1]  # for the next query, a key is one distance nearer
    # not two slices: the backward pass of each writes twice as much
    return scores.as_strided([batch, heads, length, length], strides, length)


def relative_values(weights: Tensor, vectors: Tensor) -> Tensor:
    """Return sums of the vectors of :func:`all_distances`, weighted by keys (B x H x T x T): B x H x T x D."""
    batch, heads, length = weights.size(0), weights.size(1), weights.size(2)
    row = 2 * length
    nothing = torch.zeros(batch, heads, length, row, dtype=weights.dtype, device=weights.device)
    strides = [heads * length * row, length * row, row - 1, 1]
    return torch.matmul(torch.as_strided_scatter(nothing, weights, weights.shape, strides, length), vectors)


def step_distances(attention, queries: int, keys: int, beam: int, device: torch.device, place: Tensor | None) -> Tensor:
    """Return the index of the relative vector for each query and key of a decoding step, T x S.

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


def score_distances(attention, q: Tensor, distances: Tensor | None) -> Tensor:
    """Return the scores of relative positions: B x H x T x S; *distances*: see :func:`step_distances`."""
    relative_keys = attention.relative_keys
    if distances is None:
        vectors = all_distances(relative_keys * attention.head_dim**-0.5, attention.farthest, q.size(2))
        return relative_scores(q, vectors.to(q.dtype))
    scores = torch.matmul(q * attention.head_dim**-0.5, relative_keys.t().to(q.dtype))
    return scores.gather(3, distances.expand(q.size(0), q.size(1), q.size(2), -1))
