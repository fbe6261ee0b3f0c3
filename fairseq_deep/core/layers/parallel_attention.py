"""Decoder sub-layer with self-attention and attention to the source in parallel.

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 6:

    SAAN(S) = [M_a (S W_v)] W_o             Eq. (16)     M_a: mean over each position and all earlier ones
    MATT(S) = SAAN(S) + ATT(S, H_L)         Eq. (17)     W_v and W_o belong to the attention to the source
    S'      = LN(S + MATT(S))

and the ablations in its Table 3, ATT'(S) + ATT(S, H_L) with ATT' a self-attention (row 6) or the average attention
network (row 7), each with its own matrices.

Names here: S is ``x``, H_L ``context.memory``, ATT ``encoder_attn``, W_v and W_o its ``v_proj`` and ``out_proj`` with
biases.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_deep.core.attention import RunningMean

from .context import DecoderContext
from .target_attention import attend_to_source, attend_to_target


class ParallelAttention(nn.Module):
    """Base class of decoder layers with two attentions to the same input.

    Attributes:
        encoder_attn: the attention to the source
        self_attn: the attention to the target's positions; None if *encoder_attn* includes it
        mean: the mean of the target's values if *self_attn* is None
    """

    def set_attentions(self, encoder_attn: nn.Module, self_attn: nn.Module | None) -> None:
        """Set the attentions."""
        self.encoder_attn = encoder_attn
        self.self_attn = self_attn
        self.mean = RunningMean() if self_attn is None else None

    def attend(self, x: Tensor, context: DecoderContext, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the sum of both attentions (T x B x C), and the weights of the attention to the source or None."""
        assert context.memory is not None, "merged attention requires a source"
        added = None
        if self.mean is not None:
            averages_before = context.causal or context.mask is not None or context.cache is not None
            values = self.encoder_attn.v_proj(x)
            added = self.mean(values, context.padding, averages_before, context.cache, context.step)
        y, weights = attend_to_source(self.encoder_attn, x, context, need_weights, added)
        if self.self_attn is not None:
            y = y + attend_to_target(self.self_attn, x, context).to(y.dtype)
        return y, weights
