"""Relative positions of whole sentences: every distance at its own place, and a skewed view of that.

A query meets the T keys at T distances, another for each query. Scores for all distances -T ... T-1 are one product, in
rows of 2T; the scores of the keys are the same numbers seen with rows of 2T-1 (as in Music Transformer, Huang et al.,
2019, Section 3.4.1). So nothing is gathered, and no gradient is scattered: its backward pass is one copy.
"""

from typing import List

import torch
from torch import Tensor


def all_distances(vectors: Tensor, farthest: int, length: int) -> Tensor:
    """The vectors of the distances -length ... length-1, clipped: 2T x D.

    Args:
        vectors: those of -farthest ... (one each), R x D with R > 1; the ends stand for all that is farther
        farthest: number of distances before 0
        length: T
    """
    rows = vectors.size(0)
    first, middle, last = vectors.split([1, rows - 2, 1])
    before, after = length - farthest + 1, length - (rows - 1 - farthest)  # how often the ends are taken
    if before < 0 or after < 0:
        middle = middle[max(-before, 0) : rows - 2 - max(-after, 0)]
    return torch.cat([first.expand(max(before, 0), -1), middle, last.expand(max(after, 0), -1)])


def _strides(length: int, batch: int, heads: int) -> List[int]:
    """Strides of B x H x T x T in T x B x H x 2T: a query further, the same key is one distance less."""
    return [heads * 2 * length, 2 * length, batch * heads * 2 * length - 1, 1]


def to_keys(distances: Tensor) -> Tensor:
    """B x H x T (queries) x T (keys) of T x B x H x 2T (distances); a view."""
    length, batch, heads = distances.size(0), distances.size(1), distances.size(2)
    # two slices would do, but the backward pass of each writes twice as much
    return distances.contiguous().as_strided(
        [batch, heads, length, length], _strides(length, batch, heads), distances.storage_offset() + length
    )


def to_distances(keys: Tensor) -> Tensor:
    """T x B x H x 2T (distances) of B x H x T (queries) x T (keys): the transpose of :func:`to_keys`."""
    batch, heads, length = keys.size(0), keys.size(1), keys.size(2)
    nothing = torch.zeros(length, batch, heads, 2 * length, dtype=keys.dtype, device=keys.device)
    return torch.as_strided_scatter(nothing, keys, keys.shape, _strides(length, batch, heads), length)
