"""The attentions of a decoder layer to choose from (``--decoder-attn``).

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 5.
"merged" is its MAtt; "merged-self" and "merged-average" are rows 6 and 7 of its Table 3.
"""

from typing import Optional

from ..registry import Registry

DECODER_ATTENTIONS = Registry("--decoder-attn")


@DECODER_ATTENTIONS.register("self")
class SelfThenSource:
    """Self-attention, then attention to the source.

    Attributes:
        positions: what looks at the target's positions: "self", "average", or None where the attention to the source
            does that with matrices of its own
        parallel: both attentions see the same input, and are one sub-layer
    """

    positions: Optional[str] = "self"
    parallel = False


@DECODER_ATTENTIONS.register("average")
class AverageThenSource(SelfThenSource):
    """Average attention with its gate, then attention to the source."""

    positions = "average"


@DECODER_ATTENTIONS.register("merged")
class Merged(SelfThenSource):
    """MAtt: a mean of the target's values is added within the attention to the source."""

    positions = None
    parallel = True


@DECODER_ATTENTIONS.register("merged-self")
class MergedSelf(SelfThenSource):
    """Self-attention beside attention to the source."""

    parallel = True


@DECODER_ATTENTIONS.register("merged-average")
class MergedAverage(SelfThenSource):
    """Average attention with its gate beside attention to the source."""

    positions = "average"
    parallel = True
