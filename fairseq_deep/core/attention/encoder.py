"""Encoder attention methods (``--encoder-attn``)."""

from __future__ import annotations

from torch import nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.stack import Stack

from .multihead import MultiheadAttention

ENCODER_ATTENTIONS = Registry("--encoder-attn")


@ENCODER_ATTENTIONS.register("self")
class SelfOfSource(Method):
    """Self-attention.

    Attributes:
        packs: a packed sequence precedes the positions of the source (:mod:`.luna`)
        relative: it has keys of the source's positions, which relative and rotary positions require
        parallel: always False: an encoder has no second attention
    """

    packs = False
    relative = True
    parallel = False
    paper = "Vaswani 2017"

    def target(self, stack: Stack, bias: bool) -> nn.Module:
        """Build the attention to the positions of the source."""
        return MultiheadAttention(stack, bias=bias)

    def packed_sequence(self, stack: Stack) -> nn.Module | None:
        """Build the packed sequence of *stack*; None for no packed sequence."""
        return None
