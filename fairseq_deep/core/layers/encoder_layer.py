"""Transformer encoder layer (Attention Is All You Need, Vaswani et al., 2017)."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_deep.core.attention import FirstValues, self_attention
from fairseq_deep.core.native.layers import describe_layer
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base_layer import BaseLayer, build_norm, has_norms


class EncoderLayer(BaseLayer):
    """Self-attention and feed-forward sub-layers, each with dropout, residual connection and layer norm.

    Args:
        stack: the encoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    kernels = describe_layer

    def __init__(self, stack: Stack, residual: ResidualConnection | None = None):
        super().__init__(stack, residual)
        self.self_attn = self.attention(stack)
        self.self_attn_layer_norm = build_norm(stack, has_norms(stack))

    def attention(self, stack: Stack) -> nn.Module:
        """Build the attention to the source's positions."""
        return self_attention(stack, causal=False)

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        languages: Tensor | None = None,
        values: FirstValues | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x: T x B x C
            encoder_padding_mask: B x T, true where *x* is padding, or its :func:`padding_bias`, computed once for all
                layers; None if there is no padding
            languages: indices of the target languages, B, which norms may depend on
            values: the values of the first layer, with value residual

        Returns:
            T x B x C
        """
        bottom = x
        x = self.branch_input(x, self.self_attn_layer_norm, languages)
        x, _ = self.self_attn(x, key_padding_mask=encoder_padding_mask, values=values)
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        x = self.branch_sum(x, self.self_attn_layer_norm, languages)
        return self.feed_forward(x, bottom, languages)
