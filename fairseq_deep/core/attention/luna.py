"""Luna: attention through a packed sequence of fixed length.

Luna: Linear Unified Nested Attention, Ma et al., NeurIPS 2021. Each layer updates the source x (n positions) and a
packed sequence p of l rows. Attn denotes the heads of multi-head attention without an output matrix. An encoder layer
computes

    p~ = Attn(p, x)              l queries: "pack"
    a  = Attn(x, p~) W_o         l keys: "unpack"
    x' = LN(x + a),   p' = LN(p + p~)

The feed-forward sub-layer applies only to x'. Both products take O(l n) instead of O(n^2). The first p is a learned
l x d matrix, N(0, 1/d), treated like embeddings: times sqrt(d), plus sinusoids from position 0 on. A sentence with
fewer than l tokens uses as many rows as it has tokens.

In the decoder, attention to the source also packs and unpacks. It continues p from the last layer of the encoder:

    p~ = Attn(p, source),   a = Attn(x, p~) W_o,   p' = LN(p + p~)

p depends only on the source, so the encoder computes p and p~ for all decoder layers once per sentence
(:mod:`fairseq_deep.core.memories.luna`). Self-attention is a causal linear attention over l "slots". With
q_t, k_t, v_t the projections of x_t in a head of width D:

    alpha_t = softplus(p W_pq (x_t W_pc)^T / sqrt(D))          in R^l, with softplus(z) = log(1 + 2^z) / log 2
    w_t     = softmax(q_t (1/t sum_{i<=t} k_i^T alpha_i) / sqrt(D))
    out_t   = w_t (1/t sum_{i<=t} alpha_i^T v_i)               followed by W_o

In decoding, the state of a head is two means of D x l numbers. Versions of the authors' code use softplus or
elu(z) + 1 for alpha; we use softplus. Keys and values have a matrix each ("untied").

Here W_pq and W_pc are ``pq_proj`` and ``pc_proj``, W_o is ``out_proj``, and the learned p is ``encoder.packed.weight``.
The matrices of "pack" are ``pack``, in the encoder's ``self_attn`` and in ``encoder.memory``. The decoder's attentions
are in :mod:`.luna_causal`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.positions import sinusoids
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .context import LayerContext
from .encoder import ENCODER_ATTENTIONS, SelfOfSource
from .multihead import MultiheadAttention

LENGTH = 16
"""Default of ``--luna-length``, the number of rows of p."""


def hidden_rows(padding: Tensor, rows: int) -> Tensor:
    """Return a mask of the rows of p that a sentence does not use, B x *rows*: it uses one row per token.

    Args:
        padding: B x S, true where the source is padding
    """
    words = padding.logical_not().sum(1, keepdim=True)
    return torch.arange(rows, device=padding.device).unsqueeze(0) >= words


class PackedSequence(nn.Module):
    """Packed sequence p before the first layer.

    Args:
        stack: the encoder
        length: number l of rows

    Shapes:
        weight: l x C
    """

    def __init__(self, stack: Stack, length: int):
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.empty(length, stack.dim))
        nn.init.normal_(self.weight, std=stack.dim**-0.5)
        self.scale = math.sqrt(stack.dim) if stack.scale_embedding else 1.0
        positions = sinusoids(length, stack.dim) if stack.positions == "sinusoidal" else None
        self.register_buffer("positions", positions, persistent=False)
        self.layer_norm = make_norm(stack) if stack.embedding_norm else None
        self.dropout_module = dropout_of(self, stack.dropout)

    def forward(self, sentences: int) -> Tensor:
        """Return p for a number of *sentences*, l x B x C."""
        p = self.scale * self.weight
        if self.positions is not None:
            p = p + self.positions
        if self.layer_norm is not None:
            p = self.layer_norm(p)
        return self.dropout_module(p.unsqueeze(1).expand(-1, sentences, -1))


class Packing(MultiheadAttention):
    """Attention of p to a sequence, without an output matrix: p~.

    Args:
        stack: gives width, heads and dropout
    """

    def __init__(self, stack: Stack):
        plain = replace(stack, attention_gate=None, sub_norm=False)
        super().__init__(plain, stack.dim, bias=stack.layout.attention_bias)
        self.out_proj = nn.Identity()

    def reset_parameters(self) -> None:
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)


class LunaAttention(MultiheadAttention):
    """Pack and unpack: the attention of an encoder layer.

    Args:
        stack: the encoder
        length: number l of rows of p
    """

    def __init__(self, stack: Stack, length: int):
        super().__init__(stack, stack.dim)
        self.length = length
        self.pack = Packing(stack)

    def split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Split *both*, (l + S) x B x C, into p and x."""
        return both.split([self.length, both.size(0) - self.length])

    def forward(self, query: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query: p followed by x, (l + S) x B x C
            context: its padding, B x (l + S), is true where a row is not used or *x* is padding

        Returns:
            p~ followed by a, (l + S) x B x C, and None
        """
        p, x = self.split(query)
        rows = words = None
        if context.padding is not None:
            rows, words = context.padding[..., : self.length], context.padding[..., self.length :]
        packed, _ = self.pack(p, LayerContext(x, words))
        a, _ = super().forward(x, LayerContext(packed, rows))
        return torch.cat([packed, a]), None


@ENCODER_ATTENTIONS.register("luna")
class LunaOfSource(SelfOfSource):
    """Pack and unpack through p.

    Args:
        length: number l of rows of p
    """

    packs = True
    relative = False
    paper = "Ma 2021"
    architectures = {"luna_encoder_6l": ("post", (6, 6), {})}
    options = {"length": Option("rows of the packed sequence", Range(1))}

    def __init__(self, length: int = LENGTH):
        self.length = length

    def target(self, stack: Stack, bias: bool) -> nn.Module:
        return LunaAttention(stack, self.length)

    def packed_sequence(self, stack: Stack) -> nn.Module | None:
        return PackedSequence(stack, self.length)

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if not stack.layout.residual:
            raise UsageError(
                f"--encoder-attn luna requires the residual connections that --layer-agg {stack.aggregator.name} "
                "replaces: use --encoder-layer-agg residual, or --encoder-attn self"
            )
        if other.memory.name != "last":
            raise UsageError(
                f"--decoder-memory {other.memory.name} is not supported with --encoder-attn luna: omit one of them"
            )
