"""Transformer decoder layers (Attention Is All You Need, Vaswani et al., 2017), with two attentions or merged ones."""

from typing import Dict, Optional, Tuple

from torch import Tensor

from ..inits import PLAIN, Connection
from .base_layer import CROSS, FFN, MERGED, SELF, BaseLayer, build_norm
from .parallel_attention import ParallelAttention
from .target_attention import build_source_attention, build_target_attention


class DecoderLayer(BaseLayer):
    """Self-attention, attention to the source and feed-forward, each with dropout, residual connection and layer norm.

    With ``--decoder-attn average`` the first is average attention.

    Args:
        cfg: fairseq's ``TransformerConfig``
        no_encoder_attn: leave out the attention to the source
        connection: the residual connections
    """

    def __init__(self, cfg, no_encoder_attn: bool = False, connection: Connection = PLAIN):
        sublayers = [SELF, FFN] if no_encoder_attn else [SELF, CROSS, FFN]
        super().__init__(cfg, cfg.decoder, "TransformerDecoderLayer", sublayers, connection)
        self.self_attn = build_target_attention(cfg)
        self.self_attn_layer_norm = build_norm(cfg, self.embed_dim, connection)
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if not no_encoder_attn:
            self.encoder_attn = build_source_attention(cfg)
            self.encoder_attn_layer_norm = build_norm(cfg, self.embed_dim, connection)

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
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Run the layer; the contract is that of fairseq's ``TransformerDecoderLayerBase``.

        Args:
            x: T x B x C
            encoder_out: S x B x C of the encoder
            encoder_padding_mask: B x S
            incremental_state: the attentions' caches
            self_attn_mask: T x T, added to the scores
            self_attn_padding_mask: B x T
            need_attn, need_head_weights: return the weights of the attention to the source

        Returns:
            T x B x C, the weights of the attention to the source (H x B x T x S) or None, and None
        """
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(
            x,
            key_padding_mask=self_attn_padding_mask,
            attn_mask=self_attn_mask,
            incremental_state=incremental_state,
        )
        x = self.residual(residual, self.dropout_module(x), 0)
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
            x = self.residual(residual, self.dropout_module(x), 1)
            if not self.normalize_before:
                x = self.encoder_attn_layer_norm(x)
        return self.feed_forward(x), attn, None


class ParallelDecoderLayer(ParallelAttention, BaseLayer):
    """Both attentions as one sub-layer, then feed-forward, each with dropout, residual connection and layer norm.

    Args:
        cfg: fairseq's ``TransformerConfig``
        connection: the residual connections
    """

    def __init__(self, cfg, connection: Connection = PLAIN):
        super().__init__(cfg, cfg.decoder, "TransformerDecoderLayer", [MERGED, FFN], connection)
        self.set_attentions(build_source_attention(cfg), build_target_attention(cfg))
        self.encoder_attn_layer_norm = build_norm(cfg, self.embed_dim, connection)

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
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Run the layer; see :meth:`DecoderLayer.forward`."""
        residual = x
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
        )
        x = self.residual(residual, self.dropout_module(x), 0)
        if not self.normalize_before:
            x = self.encoder_attn_layer_norm(x)
        return self.feed_forward(x), attn, None
