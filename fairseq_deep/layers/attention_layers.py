"""Layers that are their attention alone, for aggregators that replace residual connections and feed-forward sub-layer.

Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024. With Out_{i-1} the input of the layer, M the encoder's
output, and LN a layer norm (the paper is silent on where it stands; as in the authors' other models, on the query):

    encoder   A = SelfAttention(LN(Out_{i-1}))
    decoder   S = SelfAttention(LN(Out_{i-1})),  X = CrossAttention(LN(S), M),  merged into S + X or [S | X]

The projections have no bias: the printed parameter counts leave no other reading.
"""

from typing import Dict, Optional, Tuple

import torch
from fairseq.modules import FairseqDropout, LayerNorm
from torch import Tensor, nn

from .base_layer import build_self_attention
from .parallel_attention import ParallelAttention
from .target_attention import build_source_attention, build_target_attention


class AttentionEncoderLayer(nn.Module):
    """Self-attention of the normalised input, with dropout; no residual connection.

    Args:
        cfg: fairseq's ``TransformerConfig``
    """

    def __init__(self, cfg):
        super().__init__()
        self.self_attn = build_self_attention(cfg, cfg.encoder, causal=False, bias=False)
        self.self_attn_layer_norm = LayerNorm(cfg.encoder.embed_dim, export=cfg.export)
        self.dropout_module = FairseqDropout(cfg.dropout, module_name="TransformerEncoderLayer")

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor]) -> Tensor:
        """Attention output (T x B x C) of *x* (T x B x C), whose padding is true in *encoder_padding_mask* (B x T)."""
        x, _ = self.self_attn(self.self_attn_layer_norm(x), key_padding_mask=encoder_padding_mask)
        return self.dropout_module(x)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Nothing to rename; fairseq's encoder calls it."""


class AttentionDecoderLayer(nn.Module):
    """Masked self-attention and attention to the source, or one of them, each with dropout.

    Args:
        cfg: fairseq's ``TransformerConfig``
        merge: "add" or "concat": how the outputs of the two attentions become one
        attn_residual: the second attention's query is S + Out_{i-1} instead of S
        attends_to_self, attends_to_source: which of the two attentions the layer has
    """

    def __init__(
        self,
        cfg,
        merge: str = "add",
        attn_residual: bool = False,
        attends_to_self: bool = True,
        attends_to_source: bool = True,
    ):
        super().__init__()
        dim = cfg.decoder.embed_dim
        self.concat = merge == "concat"
        self.attn_residual = attn_residual
        self.self_attn = self.self_attn_layer_norm = None
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if attends_to_self:
            self.self_attn = build_target_attention(cfg, bias=False)
            self.self_attn_layer_norm = LayerNorm(dim, export=cfg.export)
        if attends_to_source:
            self.encoder_attn = build_source_attention(cfg, bias=False)
            self.encoder_attn_layer_norm = LayerNorm(dim, export=cfg.export)
        self.dropout_module = FairseqDropout(cfg.dropout, module_name="TransformerDecoderLayer")

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
        cfg: fairseq's ``TransformerConfig``
    """

    def __init__(self, cfg):
        super().__init__()
        self.set_attentions(build_source_attention(cfg, bias=False), build_target_attention(cfg, bias=False))
        self.encoder_attn_layer_norm = LayerNorm(cfg.decoder.embed_dim, export=cfg.export)
        self.dropout_module = FairseqDropout(cfg.dropout, module_name="TransformerDecoderLayer")

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
        """Run the layer; see :meth:`AttentionDecoderLayer.forward`."""
        x, attn = self.attend(
            self.encoder_attn_layer_norm(x),
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            self_attn_mask,
            self_attn_padding_mask,
            need_attn or need_head_weights,
        )
        return self.dropout_module(x), attn, None
