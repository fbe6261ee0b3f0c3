"""Builds layers from the description of a stack."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fairseq_deep.core.inits import Init
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .layer import BareLayer, Layer
from .luna_layer import LunaLayer


def build_layer(stack: Stack, init: Init, number: int) -> list[nn.Module]:
    """Build the modules of layer *number* (from 1): one module, or if layers are split, one per sub-layer."""
    if number == 1:
        stack = replace(stack, value_residual=False)  # the other layers add its values
    if stack.layout.residual:
        residual = init.connection(number) or stack.residual.build(stack, number)
        return [(LunaLayer if stack.packs and stack.side == "encoder" else Layer)(stack, residual)]
    if stack.layout.split:
        return [BareLayer(stack, (name,)) for name in stack.sublayers]
    if stack.layout.feed_forward:
        raise UsageError(
            f"--layer-agg {stack.aggregator.name} has feed-forward sub-layers without residual connection: "
            "set split in its layout"
        )
    return [BareLayer(stack, stack.sublayers)]
