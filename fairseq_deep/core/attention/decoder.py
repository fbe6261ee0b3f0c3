"""Decoder attention methods (``--decoder-attn``): attention to the target and its order relative to the source.

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 6.
"merged" is its MAtt; "merged-self" and "merged-average" are rows 6 and 7 of its Table 3.
"""

from typing import Any

from torch import nn

from fairseq_deep.core.fields import Option
from fairseq_deep.core.registry import Method, Registry, UsageError
from fairseq_deep.core.stack import Stack

from .average import AverageAttention
from .multihead import MultiheadAttention

DECODER_ATTENTIONS = Registry("--decoder-attn")


@DECODER_ATTENTIONS.register("self")
class SelfThenSource(Method):
    """Self-attention, then attention to the source.

    Attributes:
        parallel: both attentions read the same input and form one sub-layer
        relative: it has keys of the target's positions, which relative and rotary positions require
        full_context: positions can also see later ones, for ``--full-context-alignment``
        packs: the source is packed into few rows, so no attention weights align it with the target (:mod:`.luna`)
    """

    parallel = False
    relative = True
    full_context = True
    packs = False
    paper = "Vaswani 2017"

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        """Build the attention to the target's positions; None if the attention to the source includes it."""
        return MultiheadAttention(stack, causal=True, bias=bias)

    def source(self, stack: Stack, bias: bool) -> MultiheadAttention:
        """Build the attention to the source."""
        return MultiheadAttention(stack, stack.dim if stack.memory_dim is None else stack.memory_dim, bias=bias)


@DECODER_ATTENTIONS.register("average")
class AverageThenSource(SelfThenSource):
    """Average attention with its gate, then attention to the source.

    Args:
        ffn: apply a feed-forward network to the mean
    """

    relative = False
    paper = "Zhang 2018"
    options = {"ffn": Option("a feed-forward network on the mean")}

    def __init__(self, ffn: bool = False):
        self.ffn = ffn

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if options.get("ffn") and not stack.layout.feed_forward:
            raise UsageError(
                f"--average-ffn requires a feed-forward width: omit it with --layer-agg {stack.aggregator.name}"
            )

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return AverageAttention(stack.dim, stack.ffn_dim if self.ffn else None, stack.activation_dropout)


@DECODER_ATTENTIONS.register("merged")
class Merged(SelfThenSource):
    """MAtt: attention to the source that adds a mean of the target's values to its heads."""

    parallel = True
    relative = False
    paper = "Zhang 2019"

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if other.dim != stack.dim:
            raise UsageError(
                "--decoder-attn merged has one matrix for the values of both sides: make --encoder-embed-dim and "
                f"--decoder-embed-dim equal ({other.dim} and {stack.dim}), or use merged-average"
            )

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return None


@DECODER_ATTENTIONS.register("merged-self")
class MergedSelf(SelfThenSource):
    """Self-attention in parallel with attention to the source."""

    parallel = True
    paper = "Zhang 2019"


@DECODER_ATTENTIONS.register("merged-average")
class MergedAverage(AverageThenSource):
    """Average attention with its gate, in parallel with attention to the source."""

    parallel = True
    paper = "Zhang 2019"
