"""Attention in a decoding step on a CPU, with few operations and few passes over memory.

A hypothesis has one query, so the overhead of calling an operation exceeds its computation.
"""


import torch
from torch import Tensor

from fairseq_deep.core.compat import autocasts

from .beam_reorder import BeamReorder, keep_sources
from .masks import is_sync_free
from .relative import score_distances, step_distances

SHORT = 16  # entries: torch's softmax processes shorter rows one by one
MANY = 2048  # total entries from which this is slower than several passes over all of them


def takes_rows(attention, query: Tensor, memory: Tensor | None, step) -> bool:
    """Return whether :func:`step_rows` supports this step: fp32 on a CPU, no gradients, dropout or relative values."""
    if memory is None and (attention.qkv_proj is None or step is None or step.mask is None or step.place is not None):
        return False
    plain = query.dtype == torch.float32 and query.size(0) == 1 and attention.relative_values is None
    drops = attention.dropout > 0 and (attention.training or attention.retain_dropout)
    return plain and not drops and not torch.is_grad_enabled() and is_sync_free(query) and not autocasts()


def step_rows(attention, query: Tensor, memory, padding, incremental_state, added, step, values) -> Tensor:
    """Return the output of a :class:`MultiheadAttention`, 1 x B x C; see its ``forward``."""
    heads, dim = attention.num_heads, attention.head_dim
    rows = query.view(-1, query.size(2))
    if memory is None:
        groups, beam = step.mask.size(0), step.mask.size(2)
        q, new = _own_rows(attention, rows, groups, beam, incremental_state, values)
        key, value = attention.own_cache(incremental_state, new, caller_checks_nan=step.caller_checks_nan).unbind(0)
        bias = step.mask
        if attention.relative_keys is not None:
            distances = step_distances(attention, beam, key.size(2), beam, q.device, None)
            bias = score_distances(attention, q.transpose(1, 2), distances) + bias
    else:
        q = attention.q_proj(rows)
        key, value, bias = attention._of_memory(q, memory, padding, incremental_state)
        q = q.view(key.size(0), -1, heads, dim)
        if attention.q_norm is not None:
            q = attention.q_norm(q)
    x = attend_rows(q, key, value, bias)
    return attention.project_output(x.view(query.shape), query, added)


def _own_rows(attention, rows: Tensor, groups: int, beam: int, incremental_state, values) -> tuple[Tensor, Tensor]:
    """Return queries (sentences x beam x H x D), and the new keys and values (2 x sentences x H x beam x D)."""
    heads, kv_heads, dim = attention.num_heads, attention.kv_heads, attention.head_dim
    qkv = attention.qkv_proj(rows).view(groups, beam, -1, dim)
    q, new = qkv.narrow(2, 0, heads), qkv.narrow(2, heads, 2 * kv_heads).unflatten(2, (2, kv_heads))
    is_rotated = attention.q_norm is not None or attention.rotary is not None
    if is_rotated or values is not None:
        k, v = new.unbind(2)
        if is_rotated:
            position = attention.own_cache.length(incremental_state) // beam
            q, k = attention.norm_and_rotate(q, k, position)
        if values is not None:
            v = values.mix(v.transpose(1, 2), attention.value_residual).transpose(1, 2)
        new = torch.stack([k, v], dim=2)
    return q, new.permute(2, 0, 3, 1, 4)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v of each head.

    Args:
        q: sources x beam x H x D
        k, v: sources x H x S x D, or with fewer heads, each for a group of heads of *q*
        bias: added to the scores, sources x 1 or H x 1 or beam x S

    Returns:
        (sources * beam) x C
    """
    batch, length, heads, dim = q.shape
    # the heads of a group become additional queries to the same keys
    queries = q.transpose(1, 2).reshape(batch * k.size(1), -1, dim)
    nothing = torch.empty(1, 1, 1, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(nothing, queries, k.flatten(0, 1).transpose(1, 2), beta=0.0, alpha=dim**-0.5)
    if bias is not None:
        scores.view(batch, heads, length, -1).add_(bias)
    x = torch.bmm(softmax_(scores), v.flatten(0, 1))
    return x.view(batch, heads, length, dim).transpose(1, 2).reshape(batch * length, heads * dim)


def softmax_(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, computed in place if that is faster."""
    if scores.size(-1) >= SHORT or scores.numel() < MANY:
        return torch.softmax(scores, dim=-1)
    exponentials = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return exponentials.div_(exponentials.sum(-1, keepdim=True))


def by_column(k: Tensor) -> Tensor:
    """Lay out keys (B x H x S x D) for the products of many decoding steps: on a CPU, as D x S."""
    return k.contiguous() if k.is_cuda else k.transpose(2, 3).contiguous().transpose(2, 3)


def keep_keys(k: Tensor, order: BeamReorder) -> Tensor:
    """Select the keys of the sources of *order*, in their present layout."""
    if k.is_contiguous():
        return keep_sources(k, 0, order)
    return keep_sources(k.transpose(2, 3), 0, order).transpose(2, 3)
