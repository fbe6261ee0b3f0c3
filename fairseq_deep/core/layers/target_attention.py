"""Runs the attentions of a layer, in kernels or by torch's operations."""

from __future__ import annotations

from torch import Tensor, nn

from .context import LayerContext


def attend_to_target(attention: nn.Module, x: Tensor, context: LayerContext) -> Tensor:
    """Attend to the positions of the stack itself (T x B x C)."""
    native = context.native and context.native.parts.get(attention)
    if native:
        return native(x, context)
    values = {} if context.values is None else {"values": context.values}  # only self-attention has values
    of_memory = {}
    if getattr(attention, "reads_memory", False):
        of_memory = {"memory": context.memory, "memory_padding": context.memory_padding}
    return attention(
        x,
        key_padding_mask=context.padding,
        attn_mask=context.mask,
        incremental_state=context.cache,
        step=context.step,
        causal=context.causal,
        **values,
        **of_memory,
    )[0]


def attend_to_source(
    attention: nn.Module, x: Tensor, context: LayerContext, need_weights: bool, added: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attend to the source: T x B x C, and the weights (H x B x T x S) or None.

    Args:
        added: T x B x C, added to the output of the heads before the output projection
    """
    native = context.native and context.native.parts.get(attention)
    if native and not need_weights:
        return native(x, context, added), None
    return attention(
        x,
        context.memory,
        key_padding_mask=context.memory_padding,
        incremental_state=context.cache,
        need_weights=need_weights,
        added=added,
    )
