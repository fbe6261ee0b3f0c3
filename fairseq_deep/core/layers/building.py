"""Builds layers from the description of a stack."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fairseq_deep.core.inits import Init
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .decoder_layer import DecoderLayer, ParallelDecoderLayer
from .encoder_layer import EncoderLayer
from .luna_layer import LunaEncoderLayer
from .non_residual import (
    AttentionDecoderLayer,
    AttentionEncoderLayer,
    DecoderFeedForward,
    EncoderFeedForward,
    ParallelAttentionDecoderLayer,
)


def build_layer(stack: Stack, init: Init, number: int) -> list[nn.Module]:
    """Build the modules of layer *number* (from 1): one module, or if layers are split, one per sub-layer."""
    if number == 1:
        stack = replace(stack, value_residual=False)  # the other layers add its values
    if stack.layout.residual:
        own = init.connection(number)
        residual = stack.residual.build(stack, number) if own is None else own
        if stack.side == "encoder":
            return [(LunaEncoderLayer if stack.packs else EncoderLayer)(stack, residual)]
        return [(ParallelDecoderLayer if stack.parallel_attention else DecoderLayer)(stack, residual)]
    if stack.layout.split:
        return [_non_residual_sublayer(stack, name) for name in stack.sublayers]
    if stack.layout.feed_forward:
        raise UsageError(
            f"--layer-agg {stack.aggregator.name} has feed-forward sub-layers without residual connection: "
            "set split in its layout"
        )
    return [_non_residual_sublayer(stack, "+".join(stack.sublayers))]


def _non_residual_sublayer(stack: Stack, name: str) -> nn.Module:
    kinds = {
        ("encoder", "self"): AttentionEncoderLayer,
        ("encoder", "ffn"): EncoderFeedForward,
        ("decoder", "merged"): ParallelAttentionDecoderLayer,
        ("decoder", "ffn"): DecoderFeedForward,
    }
    if (stack.side, name) in kinds:
        return kinds[stack.side, name](stack)
    return AttentionDecoderLayer(stack, attends_to_self="self" in name, attends_to_source="cross" in name)
