"""Keys and values that grow by one position a step, and whose hypotheses beam search reorders in between.

Both are done in place, in two buffers with room to grow: a step copies what is new, and a new order copies each kept
hypothesis once. A cache is the first positions of its buffer. While gradients are recorded, tensors are made anew.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor


def append(cache: Optional[Tensor], buffer: Optional[Tensor], new: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """*cache* (2 x B x H x T x D) followed by *new* (N positions), and the buffer that holds it."""
    if torch.is_grad_enabled():
        return new if cache is None else torch.cat([cache, new], dim=3), None
    past = 0 if cache is None else cache.size(3)
    length = past + new.size(3)
    if buffer is None or buffer.size(3) < length:
        buffer = new.new_empty(new.size(0), new.size(1), new.size(2), max(2 * length, 32), new.size(4))
        if cache is not None:
            buffer[:, :, :, :past].copy_(cache)
    buffer[:, :, :, past:length].copy_(new)
    return buffer[:, :, :, :length], buffer


def select(
    cache: Tensor, buffer: Optional[Tensor], spare: Optional[Tensor], order: Tensor
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """The hypotheses *order* of *cache* (2 x B x H x T x D), the buffer that now holds them, and the other one."""
    if torch.is_grad_enabled() or buffer is None:
        return cache.index_select(1, order), None, None
    if spare is None or spare.size(3) != buffer.size(3) or spare.size(1) != order.numel():
        spare = buffer.new_empty(buffer.size(0), order.numel(), buffer.size(2), buffer.size(3), buffer.size(4))
    selected = spare[:, :, :, : cache.size(3)]
    torch.index_select(cache, 1, order, out=selected)
    return selected, spare, buffer if buffer.size(1) == order.numel() else None
