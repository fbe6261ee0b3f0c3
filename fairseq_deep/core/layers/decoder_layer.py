"""Transformer decoder layers (Attention Is All You Need, Vaswani et al., 2017), with two attentions or merged ones."""

from typing import Dict, Optional, Tuple

from torch import Tensor

from fairseq_deep.core.attention import Step
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base_layer import BaseLayer, build_norm, has_norms
from .parallel_attention import ParallelAttention
from .target_attention import source_attention, target_attention


class DecoderLayer(BaseLayer):
    """Self-attention, attention to the source and feed-forward, each with dropout, residual connection and layer norm.

    With ``--decoder-attn average`` the first is average attention.

    Args:
        stack: the decoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    def __init__(self, stack: Stack, residual: Optional[ResidualConnection] = None):
        super().__init__(stack, residual)
        self.self_attn = target_attention(stack)
        self.self_attn_layer_norm = build_norm(stack, has_norms(stack))
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if stack.cross_attention:
            self.encoder_attn = source_attention(stack)
            self.encoder_attn_layer_norm = build_norm(stack, has_norms(stack))

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

        Args:
            x: T x B x C
            encoder_out: S x B x C of the encoder
            encoder_padding_mask: B x S, true where the source is padding, or what :func:`padding_bias` makes of it
            incremental_state: the attentions' caches
            self_attn_mask: T x T, added to the scores
            self_attn_padding_mask: B x T, as that of the source
            need_attn, need_head_weights: return the weights of the attention to the source
            step: what the attentions of a step of incremental decoding share (:class:`Ancestry`)
            causal: no position sees later ones; without a *self_attn_mask* that says so

        Returns:
            T x B x C, the weights of the attention to the source (H x B x T x S) or None, and None
        """
        bottom = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(
            x,
            key_padding_mask=self_attn_padding_mask,
            attn_mask=self_attn_mask,
            incremental_state=incremental_state,
            step=step,
            causal=causal,
        )
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        attn: Optional[Tensor] = None
        if self.encoder_attn is not None and encoder_out is not None:
            residual = x
            if self.normalize_before:
                x = self.encoder_attn_layer_norm(x)
            x, attn = self.encoder_attn(
                x,
                encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                need_weights=need_attn or need_head_weights,
            )
            x = self.residual(residual, self.dropout_module(x), 1, bottom)
            if not self.normalize_before:
                x = self.encoder_attn_layer_norm(x)
        return self.feed_forward(x, bottom), attn, None


class ParallelDecoderLayer(ParallelAttention, BaseLayer):
    """Both attentions as one sub-layer, then feed-forward, each with dropout, residual connection and layer norm.

    Args:
        stack: the decoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    def __init__(self, stack: Stack, residual: Optional[ResidualConnection] = None):
        super().__init__(stack, residual)
        self.set_attentions(source_attention(stack), target_attention(stack))
        self.encoder_attn_layer_norm = build_norm(stack, has_norms(stack))

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
        """Run the layer; see :meth:`DecoderLayer.forward`."""
        bottom = x
        if self.normalize_before:
            x = self.encoder_attn_layer_norm(x)
        x, attn = self.attend(
            x,
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            self_attn_mask,
            self_attn_padding_mask,
            need_attn or need_head_weights,
            step,
            causal,
        )
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        if not self.normalize_before:
            x = self.encoder_attn_layer_norm(x)
        return self.feed_forward(x, bottom), attn, None
