"""Encoder layer with a packed sequence before the positions of the source (:mod:`fairseq_deep.core.attention.luna`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_deep.core.attention import LayerContext
from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .layer import Layer


class LunaLayer(Layer):
    """Pack and unpack, then a feed-forward sub-layer on the source only.

    Args:
        stack: the encoder
        residual: the residual connections of its sub-layers

    Attributes:
        packed_layer_norm: the norm of p
    """

    def __init__(self, stack: Stack, residual: ResidualConnection):
        super().__init__(stack, residual)
        self.packed_layer_norm = make_norm(stack)

    def _norm(self, x: Tensor) -> Tensor:
        p, x = self.self_attn.split(x)
        return torch.cat([self.packed_layer_norm(p).to(x.dtype), self.self_attn_layer_norm(x).to(x.dtype)])

    def forward(self, x: Tensor, context: LayerContext, need_weights: bool = False) -> tuple[Tensor, None]:
        """Run the layer; see :meth:`Layer.forward`.

        Args:
            x: p followed by the source, (l + T) x B x C
            context: its padding, B x (l + T), is true where a row of p is not used, or the source is padding
        """
        both, _ = self.connect(0, x, self._norm, x, context)
        p, y = self.self_attn.split(both)
        y, _ = self.connect(1, y, self.final_layer_norm, self.self_attn.split(x)[1], context)
        return torch.cat([p.to(y.dtype), y]), None
