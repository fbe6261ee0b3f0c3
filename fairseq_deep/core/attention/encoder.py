"""The choices of an encoder's attention (``--encoder-attn``)."""

from __future__ import annotations

from torch import nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.stack import Stack

ENCODER_ATTENTIONS = Registry("--encoder-attn")


@ENCODER_ATTENTIONS.register("self")
class SelfOfSource(Method):
    """Self-attention.

    Attributes:
        packs: a packed sequence stands before the positions of the source (:mod:`.luna`)
        relative: it has keys of the source's positions, which relative and rotary positions require
        parallel: there is no second attention to be parallel to
    """

    packs = False
    relative = True
    parallel = False
    paper = "Vaswani 2017"

    def packed_sequence(self, stack: Stack) -> nn.Module | None:
        """What makes the packed sequence of *stack*, if there is one."""
        return None
