"""Transformer encoder layer (Attention Is All You Need, Vaswani et al., 2017)."""

from typing import Dict, Optional

from torch import Tensor

from fairseq_deep.core.attention import self_attention
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base_layer import BaseLayer, build_norm, has_norms, noisy


class EncoderLayer(BaseLayer):
    """Self-attention and feed-forward sub-layers, each with dropout, residual connection and layer norm.

    Args:
        stack: the encoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    def __init__(self, stack: Stack, residual: Optional[ResidualConnection] = None):
        super().__init__(stack, residual)
        self.self_attn = noisy(self_attention(stack, causal=False), stack)
        self.self_attn_layer_norm = build_norm(stack, has_norms(stack))

    def forward(self, x: Tensor, encoder_padding_mask: Optional[Tensor]) -> Tensor:
        """Run the layer.

        Args:
            x: T x B x C
            encoder_padding_mask: B x T, true where *x* is padding, or what :func:`padding_bias` makes of that for all
                layers; None if nothing is

        Returns:
            T x B x C
        """
        bottom = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, key_padding_mask=encoder_padding_mask)
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        return self.feed_forward(x, bottom)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Nothing to rename here (``models/checkpoints.py``); fairseq's encoder calls it."""
