"""KV caches of incremental decoding, for the target and for the source.

The target's keys and values grow by one position per step, in place, in a buffer with spare capacity; with gradients
enabled, each step allocates new tensors. The effect of a beam reordering is computed once for all caches
(:class:`~fairseq_deep.core.attention.beam_reorder.BeamReorder`). Keys of a discarded hypothesis may be NaN, and a mask
does not hide NaN from the other hypotheses of its sentence. NaN is therefore stored as 0.
"""

import uuid
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .beam_reorder import BeamReorder, IncrementalState, keep_sources


def append(
    cache: Tensor | None, buffer: Tensor | None, new: Tensor, finite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Append *new* (N positions) to *cache* (... x T x D); return the cache and the buffer that holds it.

    With *finite*, NaN and infinities in *new* become 0.
    """
    if torch.is_grad_enabled():
        if finite:
            new = torch.nan_to_num(new, 0.0, 0.0, 0.0)
        return new if cache is None else torch.cat([cache, new], dim=-2), None
    past = 0 if cache is None else cache.size(-2)
    length = past + new.size(-2)
    buffer = with_room(cache, buffer, new, new.shape)
    place = buffer.narrow(-2, past, length - past)
    if finite:
        torch.nan_to_num(new, 0.0, 0.0, 0.0, out=place)
    else:
        place.copy_(new)
    return buffer.narrow(-2, 0, length), buffer


def with_room(cache: Tensor | None, buffer: Tensor | None, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a buffer that holds *cache* and has room for new entries of *shape* (... x N x D)."""
    past = 0 if cache is None else cache.size(-2)
    length = past + shape[-2]
    if buffer is None or buffer.size(-2) < length:
        # fused attention needs mask rows aligned to multiples of 16
        buffer = like.new_empty([*shape[:-2], max(2 * length // 64 * 64, 64), shape[-1]])
        if cache is not None:
            buffer.narrow(-2, 0, past).copy_(cache)
    return buffer


def select(cache: Tensor, buffer: Tensor | None, dim: int, order: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the entries *order* in dimension *dim* of *cache* (... x T x D), and a buffer that holds them."""
    if torch.is_grad_enabled() or buffer is None:
        return cache.index_select(dim, order), None
    shape = list(buffer.shape)
    shape[dim] = order.numel()
    buffer = buffer.new_empty(shape)
    selected = buffer.narrow(-2, 0, cache.size(-2))
    torch.index_select(cache, dim, order, out=selected)
    return selected, buffer


def of_each_hypothesis(cache: Tensor, mask: Tensor) -> Tensor:
    """Split a cache that is shared per sentence into one per hypothesis: 2 x B x H x T x D.

    Args:
        cache: 2 x sentences x H x (T * beam) x D
        mask: sentences x beam x T x beam, 0 in the slot of a hypothesis at a position
    """
    sentences, beam, length = mask.size(0), mask.size(1), mask.size(2)
    index = mask.argmax(dim=3) + torch.arange(length, device=mask.device) * beam
    index = index.view(1, sentences, 1, -1, 1)
    own = cache.gather(3, index.expand(2, -1, cache.size(2), -1, cache.size(4)))
    return own.view(2, sentences, cache.size(2), beam, -1, cache.size(4)).transpose(2, 3).flatten(1, 2)


class TargetCache(nn.Module):
    """Keys and values of the target's positions so far, stored per hypothesis or per sentence."""

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.target"

    def forward(self, incremental_state: IncrementalState, new: Tensor, place: Tensor | None = None) -> Tensor:
        """Append *new*.

        Args:
            incremental_state: stores the cache
            new: keys and values (2 x B x H x N x D) of N positions, or of the N hypotheses of a sentence at one
                position
            place: indices of *new* in a cache of a fixed capacity (N)

        Returns:
            the whole cache, 2 x B x H x T x D; with *place*, T is its capacity
        """
        saved = incremental_state.get(self._state)
        cache, buffer = (None, None) if saved is None else (saved["cache"], saved["buffer"])
        if place is not None and cache is not None:
            return cache.index_copy_(3, place, torch.nan_to_num(new, 0.0, 0.0, 0.0))
        cache, buffer = append(cache, buffer, new, finite=True)
        incremental_state[self._state] = {"cache": cache, "buffer": buffer}
        return cache

    def extend(self, incremental_state: dict, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Make room for new keys and values of *shape* (2 x B x H x N x D), which the caller fills in.

        Returns:
            the buffer; the new entries follow the earlier ones
        """
        saved = incremental_state.get(self._state)
        cache, buffer = (None, None) if saved is None else (saved["cache"], saved["buffer"])
        length = shape[3] + (0 if cache is None else cache.size(3))
        if buffer is None or buffer.size(3) < length:
            buffer = with_room(cache, buffer, like, shape)
        incremental_state[self._state] = {"cache": buffer.narrow(3, 0, length), "buffer": buffer}
        return buffer

    def length(self, incremental_state: IncrementalState) -> int:
        """Return the number of keys so far, summed over the hypotheses if they share the cache."""
        saved = incremental_state.get(self._state)
        return 0 if saved is None else saved["cache"].size(3)

    def reserve(self, incremental_state: IncrementalState, keys: int) -> None:
        """Extend the cache to *keys* keys, its size from now on; keys not in use are 0."""
        saved = incremental_state[self._state]
        cache = saved["cache"]
        room = cache.new_zeros(2, cache.size(1), cache.size(2), keys, cache.size(4))
        room.narrow(3, 0, cache.size(3)).copy_(cache)
        saved["cache"], saved["buffer"] = room, None

    def reorder(self, incremental_state: IncrementalState, order: BeamReorder) -> None:
        """Continue with the hypotheses of *order*."""
        keeps = order.mask is not None and order.sources is None and order.copies == 1 and not order.splits_sentences
        if keeps or self._state not in incremental_state:
            return
        saved = incremental_state[self._state]
        cache, buffer = saved["cache"], saved["buffer"]
        mask, rows = order.mask, order.beam_indices
        if order.copies > 1:
            cache, buffer, rows = cache.repeat_interleave(order.copies, dim=3), None, None
        elif mask is not None and order.splits_sentences:  # from now on, each hypothesis has its own cache
            cache, buffer = of_each_hypothesis(cache, mask), None
        elif mask is not None:
            rows = order.sources
            if order.moves is not None and rows is not None and buffer is not None:
                cache, buffer, rows = keep_sources(cache, 1, order), buffer.narrow(1, 0, rows.numel()), None
        if rows is not None:
            cache, buffer = select(cache, buffer, 1, rows)
        incremental_state[self._state] = {"cache": cache, "buffer": buffer}


class SourceCache(nn.Module):
    """Keys and values of the source; all sources have the same number of hypotheses, the beam."""

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.source"

    def forward(self, incremental_state: IncrementalState) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Return keys and values (sources x H x S x D) and the bias of the scores; None if nothing is stored yet."""
        saved = self.saved(incremental_state)
        return None if saved is None else (saved["key"], saved.get("value"), saved["bias"])

    def saved(self, incremental_state: dict) -> dict | None:
        """Return the stored dictionary, which a change replaces by a new one; None if nothing is stored yet."""
        return incremental_state.get(self._state)

    def keep(self, incremental_state: IncrementalState, key: Tensor, value: Tensor | None, bias: Tensor | None) -> None:
        """Store the keys, values and bias that :meth:`forward` returns."""
        if bias is not None:  # fused attention copies it at each step if its rows are not aligned to multiples of 16;
            # always a copy: all layers receive the same tensor, and each reorders its own
            bias = F.pad(bias, [0, -bias.size(-1) % 16]).narrow(-1, 0, bias.size(-1))
        incremental_state[self._state] = {"key": key, "value": value, "bias": bias}

    def reorder(self, incremental_state: IncrementalState, order: BeamReorder) -> None:
        """Continue with the sources of *order*."""
        saved = None if order.sources is None else self.forward(incremental_state)
        if saved is not None:
            key, value, bias = saved
            bias = keep_sources(bias, 0, order) if bias is not None else None
            value = None if value is None else keep_sources(value, 0, order)
            self.keep(incremental_state, _keep_keys(key, order), value, bias)


def by_column(k: Tensor) -> Tensor:
    """Lay out keys (B x H x S x D) for the products of many decoding steps: on a CPU, as D x S."""
    return k.contiguous() if k.is_cuda else k.transpose(2, 3).contiguous().transpose(2, 3)


def _keep_keys(k: Tensor, order: BeamReorder) -> Tensor:
    """Select the keys of the sources of *order*, in their present layout."""
    if k.is_contiguous():
        return keep_sources(k, 0, order)
    return keep_sources(k.transpose(2, 3), 0, order).transpose(2, 3)
