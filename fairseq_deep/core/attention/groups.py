"""Groups of heads with common keys and values: GQA, Ainslie et al., 2023 (arXiv 2305.13245), ``--decoder-kv-heads``.

The heads of a group become additional queries of one head, so that keys and values need no copies. A causal mask and
relative positions depend on the number of queries; there the keys and values are copied. With H heads in groups of
*count*, queries are B x H x T x D, and keys B x (H / count) x S x D.
"""

from __future__ import annotations

from torch import Tensor


def as_queries(q: Tensor, count: int) -> Tensor:
    """Return B x (H / count) x (count * T) x D."""
    return q.unflatten(1, (-1, count)).flatten(2, 3)


def as_bias(bias: Tensor | None, count: int) -> Tensor | None:
    """Return the bias of these queries; *bias* is (B x 1 x) T x S, the same for all heads, or has one row for all T."""
    if bias is None or bias.size(-2) == 1:
        return bias
    return bias.repeat(*[1] * (bias.dim() - 2), count, 1)


def as_heads(x: Tensor, count: int) -> Tensor:
    """Undo :func:`as_queries` for outputs or weights, which are B x (H / count) x (count * T) x D."""
    return x.unflatten(2, (count, -1)).flatten(1, 2)
