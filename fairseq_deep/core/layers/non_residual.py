"""Bare sub-layers: attentions and feed-forward networks without residual connection, for aggregators that do the rest.

F(LN(x)) or F(x), with dropout. Where an aggregator replaces the feed-forward sub-layers, too, a layer is its
attentions: Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024. With Out_{i-1} the input of the layer, M
the encoder's output, and LN a layer norm (the paper is silent on where it stands; as in the authors' other models, on
the query):

    encoder   A = SelfAttention(LN(Out_{i-1}))
    decoder   S = SelfAttention(LN(Out_{i-1})),  X = CrossAttention(LN(S + Out_{i-1}), M),  A = S + X or [S | X]

Section 2.3 of the paper computes both attentions of the decoder as in the original layer, so that the query of the
second has the layer's input in it; without ``attn_residual`` it is LN(S).

The projections have no bias: the printed parameter counts leave no other reading.
"""

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention import Step, self_attention
from fairseq_deep.core.stack import Stack

from .base_layer import FeedForward, build_dropout, build_norm, noisy
from .parallel_attention import ParallelAttention
from .target_attention import source_attention, target_attention


class AttentionEncoderLayer(nn.Module):
    """Self-attention of the input, with dropout; no residual connection.

    Args:
        stack: the encoder
    """

    def __init__(self, stack: Stack):
        super().__init__()
        self.self_attn = noisy(self_attention(stack, causal=False, bias=stack.layout.attention_bias), stack)
        self.self_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor]) -> Tensor:
        """Attention output (T x B x C) of *x* (T x B x C); the contract is that of :meth:`EncoderLayer.forward`."""
        x, _ = self.self_attn(self.self_attn_layer_norm(x), key_padding_mask=encoder_padding_mask)
        return self.dropout_module(x)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Nothing to rename here; fairseq's encoder calls it."""


class AttentionDecoderLayer(nn.Module):
    """Masked self-attention and attention to the source, or one of them, each with dropout.

    Args:
        stack: the decoder; its layout says how the outputs of two attentions become one
        attends_to_self, attends_to_source: which of the two attentions the layer has
    """

    def __init__(self, stack: Stack, attends_to_self: bool = True, attends_to_source: bool = True):
        super().__init__()
        self.concat = stack.layout.merge == "concat"
        self.attn_residual = stack.layout.attn_residual
        self.self_attn = self.self_attn_layer_norm = None
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if attends_to_self:
            self.self_attn = target_attention(stack)
            self.self_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        if attends_to_source:
            self.encoder_attn = source_attention(stack)
            self.encoder_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        step: Optional[Step] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Run the layer; the contract is that of fairseq's ``TransformerDecoderLayerBase``.

        Returns:
            the merged attention output (T x B x C, or T x B x 2C for "concat"), the weights of the attention to the
            source (H x B x T x S) if *need_attn*, and None
        """
        outputs = []
        attn: Optional[Tensor] = None
        query = x
        if self.self_attn is not None and self.self_attn_layer_norm is not None:
            y, _ = self.self_attn(
                self.self_attn_layer_norm(x),
                key_padding_mask=self_attn_padding_mask,
                attn_mask=self_attn_mask,
                incremental_state=incremental_state,
                step=step,
                causal=causal,
            )
            y = self.dropout_module(y).to(x.dtype)  # autocast leaves them different
            outputs.append(y)
            query = x + y if self.attn_residual else y
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None and encoder_out is not None:
            y, attn = self.encoder_attn(
                self.encoder_attn_layer_norm(query),
                encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                need_weights=need_attn or need_head_weights,
            )
            outputs.append(self.dropout_module(y))
        if len(outputs) == 1:
            return outputs[0], attn, None
        return torch.cat(outputs, dim=-1) if self.concat else outputs[0] + outputs[1], attn, None


class ParallelAttentionDecoderLayer(ParallelAttention):
    """Both attentions of the normalised input as one, with dropout: A = MATT(LN(Out_{i-1})).

    Args:
        stack: the decoder
    """

    def __init__(self, stack: Stack):
        super().__init__()
        self.set_attentions(source_attention(stack), target_attention(stack))
        self.encoder_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        step: Optional[Step] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Run the layer; see :meth:`AttentionDecoderLayer.forward`."""
        x, attn = self.attend(
            self.encoder_attn_layer_norm(x),
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            self_attn_mask,
            self_attn_padding_mask,
            need_attn or need_head_weights,
            step,
            causal,
        )
        return self.dropout_module(x), attn, None


class EncoderFeedForward(FeedForward):
    """The feed-forward network of an encoder layer; no residual connection.

    Args:
        stack: the encoder
    """

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.final_layer_norm = build_norm(stack, stack.layout.input_norm)

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor]) -> Tensor:
        """FFN of *x* (T x B x C); its padding does not matter."""
        return self.ffn(self.final_layer_norm(x))

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Nothing to rename here; fairseq's encoder calls it."""


class DecoderFeedForward(FeedForward):
    """The feed-forward network of a decoder layer; no residual connection.

    Args:
        stack: the decoder
    """

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.final_layer_norm = build_norm(stack, stack.layout.input_norm)

    def forward(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        step: Optional[Step] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """FFN of *x* (T x B x C); all else is of the other sub-layers. See :meth:`AttentionDecoderLayer.forward`."""
        nothing: Optional[Tensor] = None
        return self.ffn(self.final_layer_norm(x)), nothing, nothing
