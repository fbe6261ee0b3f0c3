"""The decoder of Luna: causal linear attention, and attention to the packed source; equations in :mod:`.luna`.

In training, positions within a block are one matrix product, and running sums over blocks add the earlier blocks. A
decoding step updates two means per head and hypothesis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .context import LayerContext
from .decoder import DECODER_ATTENTIONS, SelfThenSource
from .hypothesis_state import HypothesisState
from .luna import LENGTH
from .multihead import MultiheadAttention
from .target import TargetAttention

BLOCK = 128
"""Positions of a block."""


class PackedSourceAttention(MultiheadAttention):
    """Attention to the packed source p~, the lower half of the memory of :class:`LunaMemory`."""

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().project_memory(memory.chunk(2)[1])


def causal_means(x: Tensor, y: Tensor, z: Tensor, count: Tensor) -> Tensor:
    """Return 1/n_t sum_{i<=t} (x_t . y_i) z_i, B x H x T x E, in O(T).

    Positions of the same block are a product with a triangular matrix. Earlier blocks are a sum, at least in fp32.

    Args:
        x, y: B x H x T x D
        z: B x H x T x E
        count: n, B x 1 x T x 1
    """
    length = x.size(2)
    if length <= BLOCK or is_compiling():
        return _means_within(x, y, z, count)
    wide, missing = torch.promote_types(z.dtype, torch.float32), -length % BLOCK
    a, b, c = (F.pad(each, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK)) for each in (x, y, z))
    n = F.pad(count, (0, 0, 0, missing), value=1.0).unflatten(2, (-1, BLOCK))
    before, own = n[:, :, :-1, -1:], b[:, :, :-1].transpose(-1, -2)
    sums = torch.matmul(own, c[:, :, :-1] / BLOCK).to(wide).cumsum(2) * BLOCK
    # as a mean, which half precision can hold
    carried = torch.matmul(a[:, :, 1:], (sums / before).to(a.dtype)) * (before / n[:, :, 1:]).to(a.dtype)
    means = _means_within(a, b, c, n) + F.pad(carried, (0, 0, 0, 0, 1, 0))
    return means.flatten(2, 3)[:, :, :length]


def _means_within(x: Tensor, y: Tensor, z: Tensor, count: Tensor) -> Tensor:
    """Return :func:`causal_means` within a block."""
    return torch.matmul(torch.matmul(x, y.transpose(-1, -2)).tril() * (1 / count).to(x.dtype), z)


class LunaCausalAttention(TargetAttention, MultiheadAttention):
    """Causal linear attention in place of self-attention.

    Positions of padding do not change the means.

    Args:
        stack: the decoder
        bias: whether the projections have a bias
        length: number l of rows of p
    """

    method = "luna"

    def __init__(self, stack: Stack, bias: bool, length: int):
        super().__init__(stack, stack.dim, bias=bias)
        self.pq_proj, self.pc_proj = (nn.Linear(stack.dim, stack.dim, bias=bias) for _ in "pc")
        for proj in (self.pq_proj, self.pc_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
        self.means = HypothesisState("luna_means", width=2 * stack.dim * length, counts_words=True)

    def whole(self, x: Tensor, context: LayerContext) -> Tensor:
        """See :meth:`TargetAttention.whole`; the memory of *context* is 2l x sources x C, with p as its upper half."""
        padding, (q, k, v, alpha, bias) = context.padding, self._inputs(x, context)
        wide = torch.promote_types(q.dtype, torch.float32)
        if padding is None:
            count = torch.arange(1, q.size(2) + 1, device=q.device, dtype=wide).view(1, 1, -1, 1)
        else:
            words = padding.logical_not().view(padding.size(0), 1, -1, 1)
            alpha = alpha * words
            count = words.to(wide).cumsum(2).clamp(min=1.0)
        alpha = self.dropout_module(alpha)
        weights = self._weights(causal_means(q, k, alpha, count), bias)
        return self._joined(causal_means(weights, alpha, v, count), q.dtype, x)

    def next(self, x: Tensor, context: LayerContext) -> Tensor:
        """See :meth:`TargetAttention.next`; the memory is not read if the cache has the projection of p."""
        state, step, (q, k, v, alpha, bias) = context.cache, context.step, self._inputs(x, context)
        count = step.count
        shape = (k.size(0), 2, k.size(1), k.size(3), alpha.size(3))
        own = torch.stack([k, v], dim=1).transpose(-1, -2).to(count.dtype) * self.dropout_module(alpha).unsqueeze(1)
        own = own.flatten(1).unsqueeze(0)
        means = torch.lerp(self.means.previous(state, own, count.dtype), own, step.words / count)
        self.means.keep(state, means)
        keys, values = means.to(q.dtype).view(shape).unbind(1)
        heads = torch.matmul(self._weights(torch.matmul(q, keys), bias), values.transpose(-1, -2))
        return self._joined(heads, q.dtype, x)

    def _inputs(self, x: Tensor, context: LayerContext):
        """Return q, k, v and alpha (B x H x T x D or l), and the bias that hides rows of p."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._split_heads(project(x), x.size(1)) for project in projections)
        q = q * self.head_dim**-0.5
        pq, _, bias = self.read_memory(q, context)
        scores = torch.matmul(self._split_heads(self.pc_proj(x), pq.size(0)), pq.transpose(-1, -2))
        alpha = F.softplus(self._per_hypothesis(scores, x.size(0)).flatten(0, 1), beta=math.log(2.0)).to(q.dtype)
        return q, k, v, alpha, bias

    def _joined(self, heads: Tensor, dtype: torch.dtype, query: Tensor) -> Tensor:
        return self.project_output(heads.to(dtype).permute(2, 0, 1, 3).flatten(2), query, None)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        p = memory.chunk(2)[0]
        return self._split_heads(self.pq_proj(p) * self.head_dim**-0.5, p.size(1)), None

    def _weights(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Return w: a softmax at least in fp32, with dropout; *bias*: one row per source, for all its hypotheses."""
        if bias is not None:
            scores = (scores.unflatten(0, (bias.size(0), -1)) + bias.unsqueeze(1)).flatten(0, 1)
        return self.dropout_module(torch.softmax(widened(scores), dim=-1).to(scores.dtype))


@DECODER_ATTENTIONS.register("luna")
class LunaThenSource(SelfThenSource):
    """Causal linear attention, then attention to the packed source.

    Args:
        length: number l of rows of the encoder's p
    """

    relative = False
    full_context = False
    packs = True
    paper = "Ma 2021"

    def __init__(self, length: int = LENGTH):
        self.length = length

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if other.attention.name != "luna":
            raise UsageError(
                "--decoder-attn luna continues the encoder's packed sequence: add --encoder-attn luna, or use "
                "--decoder-attn self"
            )
        if other.dim != stack.dim:
            raise UsageError(
                "--decoder-attn luna has one packed sequence for both sides: make --encoder-embed-dim and "
                f"--decoder-embed-dim equal ({other.dim} and {stack.dim})"
            )

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return LunaCausalAttention(stack, bias, self.length)

    def source(self, stack: Stack, bias: bool) -> MultiheadAttention:
        return PackedSourceAttention(stack, stack.dim, bias=bias)
