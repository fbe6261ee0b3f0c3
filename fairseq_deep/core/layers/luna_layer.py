"""Encoder layer with a packed sequence before the positions of the source (:mod:`fairseq_deep.core.attention.luna`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention.luna import LunaAttention
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base_layer import build_norm
from .encoder_layer import EncoderLayer


class LunaEncoderLayer(EncoderLayer):
    """Pack and unpack, then a feed-forward sub-layer on the source only.

    Args:
        stack: the encoder
        residual: the residual connections of its sub-layers; None: plain ones

    Attributes:
        packed_layer_norm: the norm of p
    """

    def __init__(self, stack: Stack, residual: ResidualConnection | None = None):
        super().__init__(stack, residual)
        self.packed_layer_norm = build_norm(stack)

    def attention(self, stack: Stack) -> nn.Module:
        return LunaAttention(stack, stack.attention.build().length)

    def _norm(self, x: Tensor) -> Tensor:
        p, x = self.self_attn.split(x)
        return torch.cat([self.packed_layer_norm(p).to(x.dtype), self.self_attn_layer_norm(x).to(x.dtype)])

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, languages: None = None) -> Tensor:
        """Run the layer.

        Args:
            x: p followed by the source, (l + T) x B x C
            encoder_padding_mask: B x (l + T), true where a row of p is not used, or the source is padding; or its
                :func:`padding_bias`; None if nothing is hidden
            languages: not used

        Returns:
            (l + T) x B x C
        """
        bottom = x
        x, _ = self.self_attn(self.branch_input(x, self._norm), key_padding_mask=encoder_padding_mask)
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        if not self.normalize_before:
            x = self._norm(x)
        p, x = self.self_attn.split(x)
        x = self.feed_forward(x, self.self_attn.split(bottom)[1])
        return torch.cat([p.to(x.dtype), x])
