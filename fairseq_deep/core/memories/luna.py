"""Memories of ``--decoder-attn luna``: the packed sequence and the packed source of each decoder layer.

With p_1 the packed sequence after the encoder, and x its output (:mod:`fairseq_deep.core.attention.luna`), layer
j = 1 ... M computes

    post-norm   p~_j = Attn(p_j, x),       p_{j+1} = LN_j(p_j + p~_j)
    pre-norm    p~_j = Attn(LN_j(p_j), x), p_{j+1} = p_j + p~_j,   where p_1 has its own final norm

Its memory is p_j followed by p~_j. The last norm of post-norm is omitted, because nothing reads its output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention.context import LayerContext
from fairseq_deep.core.attention.luna import Packing
from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.stack import Stack

from .base import Memory


class PackingLayer(nn.Module):
    """Maps p_j to p~_j and p_{j+1}.

    Args:
        decoder: the decoder
        has_norm: whether there is a norm
    """

    def __init__(self, decoder: Stack, has_norm: bool):
        super().__init__()
        self.pre_norm = decoder.pre_norm
        self.pack = Packing(decoder)
        self.layer_norm = make_norm(decoder) if has_norm else None
        self.dropout_module = dropout_of(self, decoder.dropout)

    def forward(self, p: Tensor, source: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return p~_j and p_{j+1}, both l x B x C; see :meth:`LunaMemory.forward`."""
        before = self.layer_norm if self.pre_norm else None
        packed, _ = self.pack(p if before is None else before(p), LayerContext(source, padding))
        following = p + self.dropout_module(packed)
        if not self.pre_norm and self.layer_norm is not None:
            following = self.layer_norm(following)
        return packed, following


class LunaMemory(Memory):
    """Memories of ``--decoder-attn luna``.

    Args:
        encoder, decoder: see :class:`Memory`

    Attributes:
        layers: a :class:`PackingLayer` for each layer of the decoder
    """

    normalises = True

    def __init__(self, encoder: Stack, decoder: Stack):
        super().__init__(encoder, decoder)
        self.layer_norm = make_norm(encoder) if encoder.pre_norm and encoder.final_norm else None
        last = None if decoder.pre_norm else decoder.layers
        numbers = range(1, decoder.layers + 1)
        self.layers = nn.ModuleList(PackingLayer(decoder, number != last) for number in numbers)

    def forward(self, p: Tensor, source: Tensor, padding: Tensor | None) -> list[Tensor]:
        """Compute the memories of the decoder layers.

        Args:
            p: the packed sequence after the encoder's last layer, l x B x C
            source: the encoder's output, S x B x C
            padding: B x S, true where *source* is padding, or its :func:`padding_bias`

        Returns:
            M tensors, 2l x B x C
        """
        if self.layer_norm is not None:
            p = self.layer_norm(p)
        memories = []
        for layer in self.layers:
            packed, following = layer(p, source, padding)
            memories.append(torch.cat([p, packed.to(p.dtype)]))
            p = following
        return memories
