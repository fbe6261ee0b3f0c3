"""What attentions keep between the steps of incremental decoding: keys and values of the target, and of the source.

Those of the target grow by one position a step. They do so in place, in a buffer with room to grow, of which a cache is
the first positions; while gradients are recorded, tensors are made anew. What a new order of hypotheses does to them is
decided once for all (:class:`~fairseq_deep.attention.beams.Order`).
"""

import uuid
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from .beams import Order


def append(cache: Optional[Tensor], buffer: Optional[Tensor], new: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """*cache* (2 x B x H x T x D) followed by *new* (N positions), and the buffer that holds it."""
    if torch.is_grad_enabled():
        return new if cache is None else torch.cat([cache, new], dim=3), None
    past = 0 if cache is None else cache.size(3)
    length = past + new.size(3)
    if buffer is None or buffer.size(3) < length:
        buffer = new.new_empty(new.size(0), new.size(1), new.size(2), max(2 * length, 64), new.size(4))
        if cache is not None:
            buffer[:, :, :, :past].copy_(cache)
    buffer[:, :, :, past:length].copy_(new)
    return buffer[:, :, :, :length], buffer


def select(cache: Tensor, buffer: Optional[Tensor], order: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """The entries *order* of *cache* (2 x B x H x T x D), and a buffer that holds them."""
    if torch.is_grad_enabled() or buffer is None:
        return cache.index_select(1, order), None
    buffer = buffer.new_empty(buffer.size(0), order.numel(), buffer.size(2), buffer.size(3), buffer.size(4))
    selected = buffer[:, :, :, : cache.size(3)]
    torch.index_select(cache, 1, order, out=selected)
    return selected, buffer


def of_each_hypothesis(cache: Tensor, slots: Tensor) -> Tuple[Tensor, Tensor]:
    """A cache of each hypothesis (2 x B x H x T x D) and its padding (B x T) from that of all hypotheses of a sentence.

    Args:
        cache: 2 x sentences x H x (T * beam) x D
        slots: sentences x beam x T: where a hypothesis has its key of a position, -1 where that is padding
    """
    sentences, beam, length = slots.size(0), slots.size(1), slots.size(2)
    index = torch.arange(length, device=slots.device) * beam + slots.clamp(min=0)
    index = index.view(1, sentences, 1, -1, 1)
    own = cache.gather(3, index.expand(2, -1, cache.size(2), -1, cache.size(4)))
    own = own.view(2, sentences, cache.size(2), beam, -1, cache.size(4)).transpose(2, 3).flatten(1, 2)
    return own, slots.flatten(0, 1) < 0


class TargetCache(nn.Module):
    """Keys and values of the target's positions so far, of each hypothesis, or of all of a sentence together."""

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.target"

    def forward(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        new: Tensor,
        padding: Optional[Tensor],
        shared: bool,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Append *new*.

        Args:
            incremental_state: where they are kept
            new: keys and values, 2 x B x H x N x D; *shared*: B are the sentences and N the hypotheses of one
            padding: B x N, true where *new* is padding; None if nothing is, or *shared*, where a mask hides it
            shared: those of all hypotheses of a sentence are kept together, as :class:`Ancestry` has it for this step

        Returns:
            all of them, 2 x B x H x T x D, and their padding, B x T or None
        """
        cache: Optional[Tensor] = None
        buffer: Optional[Tensor] = None
        if self._state in incremental_state:
            saved = incremental_state[self._state]
            cache, buffer = saved["cache"], saved["buffer"]
            padding = self._all_padding(cache, saved["padding"], new, padding)
        if shared:  # those of a hypothesis that is out may be NaN, which no mask hides from the others
            new = torch.nan_to_num(new, 0.0, 0.0, 0.0)
        cache, buffer = append(cache, buffer, new)
        state: Dict[str, Optional[Tensor]] = {"cache": cache, "buffer": buffer, "padding": padding}
        incremental_state[self._state] = state
        return cache, padding

    def _all_padding(
        self, past: Optional[Tensor], past_padding: Optional[Tensor], new: Tensor, padding: Optional[Tensor]
    ) -> Optional[Tensor]:
        """Padding (B x T) of the positions *past* and *new* (2 x B x H x T x D); None if nothing is."""
        if past is None or (past_padding is None and padding is None):
            return padding
        if past_padding is None:
            past_padding = torch.zeros(past.size(1), past.size(3), dtype=torch.bool, device=new.device)
        if padding is None:
            padding = torch.zeros(new.size(1), new.size(3), dtype=torch.bool, device=new.device)
        return torch.cat([past_padding, padding], dim=1)

    @torch.jit.export
    def follow(self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], order: Order) -> None:
        """Take over the hypotheses of *order*."""
        if self._state not in incremental_state:
            return
        saved = incremental_state[self._state]
        cache, buffer, padding = saved["cache"], saved["buffer"], saved["padding"]
        assert cache is not None
        slots, rows, same = order.slots, order.hypotheses, order.same_hypotheses
        if slots is not None and order.torn:  # from now on, each hypothesis has its own
            cache, padding = of_each_hypothesis(cache, slots)
            buffer = None
        elif slots is not None:
            rows, same = order.sources, order.same_sources
        if not same:
            cache, buffer = select(cache, buffer, rows)
            padding = padding.index_select(0, rows) if padding is not None else None
        state: Dict[str, Optional[Tensor]] = {"cache": cache, "buffer": buffer, "padding": padding}
        incremental_state[self._state] = state


class SourceCache(nn.Module):
    """Keys and values of the source, of which each has the same number of hypotheses, its beam."""

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.source"

    def forward(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]]
    ) -> Optional[Tuple[Tensor, Tensor, Optional[Tensor]]]:
        """Keys and values (sources x H x S x D), and what is added to the scores; None if they are not there yet."""
        if self._state in incremental_state:
            saved = incremental_state[self._state]
            key, value = saved["key"], saved["value"]
            if key is not None and value is not None:
                return key, value, saved["bias"]
        return None

    def keep(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        key: Tensor,
        value: Tensor,
        bias: Optional[Tensor],
    ) -> None:
        """Keep what :meth:`forward` gives."""
        state: Dict[str, Optional[Tensor]] = {"key": key, "value": value, "bias": bias}
        incremental_state[self._state] = state

    @torch.jit.export
    def follow(self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], order: Order) -> None:
        """Take over the sources of *order*."""
        saved = self.forward(incremental_state)
        if saved is not None and not order.same_sources:
            key, value, bias = saved
            bias = bias.index_select(0, order.sources) if bias is not None else None
            key, value = key.index_select(0, order.sources), value.index_select(0, order.sources)
            self.keep(incremental_state, key, value, bias)
