"""The contract of a decoder's attentions (``--decoder-attn``): what looks at the target's positions, and where.

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 6.
"merged" is its MAtt; "merged-self" and "merged-average" are rows 6 and 7 of its Table 3.
"""

from typing import Any

from torch import nn

from fairseq_deep.core.registry import Method, Registry, UsageError
from fairseq_deep.core.stack import Stack

from .average import AverageAttention
from .building import attention_options, self_attention
from .multihead import MultiheadAttention

DECODER_ATTENTIONS = Registry("--decoder-attn")


@DECODER_ATTENTIONS.register("self")
class SelfThenSource(Method):
    """Self-attention, then attention to the source.

    Attributes:
        parallel: both attentions see the same input, and are one sub-layer
        relative: it has keys of the target's positions, which relative and rotary positions require
        full_context: positions can see later ones, too, as ``--full-context-alignment`` asks
        packs: the source is packed into few rows, so that no weights align it with the target (:mod:`.luna`)
    """

    parallel = False
    relative = True
    full_context = True
    packs = False
    paper = "Vaswani 2017"

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        """What attends to the target's positions; None where the attention to the source does that, too."""
        return self_attention(stack, causal=True, bias=bias)

    def source(self, stack: Stack, bias: bool) -> MultiheadAttention:
        """The attention to the source."""
        width = stack.dim if stack.memory_dim is None else stack.memory_dim
        return MultiheadAttention(stack.dim, stack.heads, kdim=width, bias=bias, **attention_options(stack))


@DECODER_ATTENTIONS.register("average")
class AverageThenSource(SelfThenSource):
    """Average attention with its gate, then attention to the source.

    Args:
        ffn: with a feed-forward network on the mean
    """

    flag_prefix = "average"
    relative = False
    paper = "Zhang 2018"

    def __init__(self, ffn: bool = False):
        self.ffn = ffn

    @staticmethod
    def add_args(parser) -> None:
        parser.add_argument("--average-ffn", action="store_true",
                            help="--decoder-attn average and merged-average: a feed-forward network on the mean")

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if options.get("ffn") and not stack.layout.feed_forward:
            raise UsageError(
                f"--average-ffn needs a feed-forward width: leave it out with --layer-agg {stack.aggregator.name}"
            )

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return AverageAttention(stack.dim, stack.ffn_dim if self.ffn else None, stack.activation_dropout)


@DECODER_ATTENTIONS.register("merged")
class Merged(SelfThenSource):
    """MAtt: a mean of the target's values is added within the attention to the source."""

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
    """Self-attention beside attention to the source."""

    parallel = True
    paper = "Zhang 2019"


@DECODER_ATTENTIONS.register("merged-average")
class MergedAverage(AverageThenSource):
    """Average attention with its gate beside attention to the source."""

    parallel = True
    paper = "Zhang 2019"
