"""Both attentions of a decoder layer as one sub-layer.

Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP 2019, Section 6:

    SAAN(S) = [M_a (S W_v)] W_o             Eq. (16)     M_a: mean over each position and those before it
    MATT(S) = SAAN(S) + ATT(S, H_L)         Eq. (17)     W_v and W_o are those of the attention to the source
    S'      = LN(S + MATT(S))

and the ablations in its Table 3, ATT'(S) + ATT(S, H_L) with ATT' a self-attention (row 6) or the average attention
network (row 7), each with matrices of its own.

Here S is ``x``, H_L ``encoder_out``, ATT ``encoder_attn``, W_v and W_o its ``v_proj`` and ``out_proj`` with biases.
"""

from typing import Dict, Optional, Tuple

from torch import Tensor, nn

from fairseq_deep.core.attention import RunningMean, Step


class ParallelAttention(nn.Module):
    """What a decoder layer whose attentions see the same input inherits.

    Attributes:
        encoder_attn: the attention to the source
        self_attn: what attends to the target's positions beside it, or None where *encoder_attn* does that, too
        mean: the mean of the target's values in that case
    """

    def set_attentions(self, encoder_attn: nn.Module, self_attn: Optional[nn.Module]) -> None:
        """Take the attentions."""
        self.encoder_attn = encoder_attn
        self.self_attn = self_attn
        self.mean = RunningMean() if self_attn is None else None

    def attend(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor],
        encoder_padding_mask: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
        self_attn_mask: Optional[Tensor],
        self_attn_padding_mask: Optional[Tensor],
        need_weights: bool,
        step: Optional[Step] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Sum of both attentions of *x* (T x B x C), and the weights of that to the source or None."""
        assert encoder_out is not None, "merged attention needs a source"
        added: Optional[Tensor] = None
        if self.mean is not None:
            averages_before = causal or self_attn_mask is not None or incremental_state is not None
            values = self.encoder_attn.v_proj(x)
            added = self.mean(values, self_attn_padding_mask, averages_before, incremental_state, step)
        y, attn = self.encoder_attn(
            x,
            encoder_out,
            key_padding_mask=encoder_padding_mask,
            incremental_state=incremental_state,
            need_weights=need_weights,
            added=added,
        )
        if self.self_attn is not None:
            own, _ = self.self_attn(
                x,
                key_padding_mask=self_attn_padding_mask,
                attn_mask=self_attn_mask,
                incremental_state=incremental_state,
                step=step,
                causal=causal,
            )
            y = y + own.to(y.dtype)
        return y, attn
