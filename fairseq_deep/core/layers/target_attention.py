"""The attentions of a decoder layer, as ``--decoder-attn`` chooses them."""

from typing import Optional

from torch import nn

from fairseq_deep.core.attention.decoder import SelfThenSource
from fairseq_deep.core.stack import Stack

from .base_layer import noisy


def _chosen(stack: Stack) -> SelfThenSource:
    return SelfThenSource() if stack.attention is None else stack.attention.build()


def target_attention(stack: Stack) -> Optional[nn.Module]:
    """What attends to the target's positions; None where the attention to the source does that, too."""
    return noisy(_chosen(stack).target(stack, stack.layout.attention_bias), stack)


def source_attention(stack: Stack) -> nn.Module:
    """The attention to the source."""
    return noisy(_chosen(stack).source(stack, stack.layout.attention_bias), stack)
