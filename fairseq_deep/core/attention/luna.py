"""Luna: attention through a packed sequence of fixed length.

Luna: Linear Unified Nested Attention, Ma et al., NeurIPS 2021. Beside the source x (n positions) goes a sequence p of l
rows. With Attn the heads of multi-head attention, without an output matrix, a layer of the encoder computes

    p~ = Attn(p, x)              l queries: "pack"
    a  = Attn(x, p~) W_o         l keys: "unpack"
    x' = LN(x + a),   p' = LN(p + p~)

and the feed-forward sub-layer is of x' alone. Both products take O(l n) instead of O(n^2). p starts as a learned l x d
matrix, N(0, 1/d), treated like embeddings: times sqrt(d), plus sinusoids from position 0 on. A sentence with fewer than
l words uses as many rows as it has words.

In the decoder, attention to the source packs and unpacks, too, and so continues p, which starts as the encoder's:

    p~ = Attn(p, source),   a = Attn(x, p~) W_o,   p' = LN(p + p~)

p depends on the source alone, so the encoder computes p and p~ for all decoder layers, once a sentence
(:mod:`fairseq_deep.core.memories.luna`). Self-attention is a causal linear attention over l "slots". With
q_t, k_t, v_t the projections of x_t in a head of width D:

    alpha_t = softplus(p W_pq (x_t W_pc)^T / sqrt(D))          in R^l, with softplus(z) = log(1 + 2^z) / log 2
    w_t     = softmax(q_t (1/t sum_{i<=t} k_i^T alpha_i) / sqrt(D))
    out_t   = w_t (1/t sum_{i<=t} alpha_i^T v_i)               followed by W_o

Two sums of D x l numbers are the state of a head in decoding. The authors released softplus and, later, elu(z) + 1 for
alpha; here it is softplus. Keys and values have a matrix each ("untied").

Here W_pq, W_pc are ``pq_proj``, ``pc_proj``; the matrices of "pack" are those of ``pack``, in the encoder's ``self_attn``
and in ``encoder.memory``; W_o is ``out_proj``; the learned p is ``encoder.packed.weight``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.dropout import dropout_of, fast_dropout
from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.positions import sinusoids
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .beams import DecodingStep
from .decoder import DECODER_ATTENTIONS, SelfThenSource
from .encoder import ENCODER_ATTENTIONS, SelfOfSource
from .hypothesis_state import HypothesisState
from .multihead import MultiheadAttention, attention_options

LENGTH = 16
"""Rows of p, unless ``--luna-length`` says otherwise."""
BLOCK = 128
"""Positions whose products are one matrix in training; sums carry what came before."""


def hidden_rows(padding: Tensor, rows: int) -> Tensor:
    """The rows of p that a sentence does not use, B x *rows*: it has one for each word, up to all.

    Args:
        padding: B x S, true where the source is padding
    """
    words = padding.logical_not().sum(1, keepdim=True)
    return torch.arange(rows, device=padding.device).unsqueeze(0) >= words


class PackedSequence(nn.Module):
    """p before the first layer.

    Args:
        stack: the encoder
        length: its rows l

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
        """p of so many *sentences*, l x B x C."""
        p = self.scale * self.weight
        if self.positions is not None:
            p = p + self.positions
        if self.layer_norm is not None:
            p = self.layer_norm(p)
        return self.dropout_module(p.unsqueeze(1).expand(-1, sentences, -1))


class Packing(MultiheadAttention):
    """Attention of p to a sequence, without an output matrix: p~.

    Args:
        stack: has the width, the heads and the dropout
    """

    def __init__(self, stack: Stack):
        dropout, bias = stack.attention_dropout, stack.layout.attention_bias
        super().__init__(stack.dim, stack.heads, kdim=stack.dim, dropout=dropout, bias=bias)
        self.out_proj = nn.Identity()

    def reset_parameters(self) -> None:
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)


class LunaAttention(MultiheadAttention):
    """Pack and unpack: the attention of an encoder layer.

    Args:
        stack: the encoder
        length: rows l of p
    """

    def __init__(self, stack: Stack, length: int):
        super().__init__(stack.dim, stack.heads, kdim=stack.dim, **attention_options(stack))
        self.length = length
        self.pack = Packing(stack)

    def forward(self, query: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query: p above x, (l + S) x B x C
            key_padding_mask: B x (l + S), true where a row is not used or *x* is padding; or what
                :func:`padding_bias` makes of that; None if nothing is hidden

        Returns:
            p~ above a, (l + S) x B x C, and None
        """
        p, x = query[: self.length], query[self.length :]
        rows = words = None
        if key_padding_mask is not None:
            rows, words = key_padding_mask[..., : self.length], key_padding_mask[..., self.length :]
        packed, _ = self.pack(p, x, words)
        a, _ = super().forward(x, packed, rows)
        return torch.cat([packed, a]), None


@ENCODER_ATTENTIONS.register("luna")
class LunaOfSource(SelfOfSource):
    """Pack and unpack through p.

    Args:
        length: rows l of p
    """

    packs = True
    relative = False
    paper = "Ma 2021"

    def __init__(self, length: int = LENGTH):
        self.length = length

    def packed_sequence(self, stack: Stack) -> nn.Module | None:
        return PackedSequence(stack, self.length)

    @staticmethod
    def add_args(parser) -> None:
        parser.add_argument("--luna-length", type=int, metavar="L",
                            help=f"--encoder-attn luna: rows of the packed sequence ({LENGTH})")

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        length = options.get("length", LENGTH)
        if length < 1:
            raise UsageError(f"--luna-length {length} leaves no row: use 1 or more")
        if not stack.layout.residual:
            raise UsageError(
                f"--encoder-attn luna requires residual connections, which --layer-agg {stack.aggregator.name} replaces "
                f"({stack.side}): use --encoder-layer-agg residual, or leave it out"
            )
        if other.memory.name != "last":
            raise UsageError(
                f"--decoder-memory {other.memory.name} is not supported with --encoder-attn luna: leave one of them out"
            )
        check_options(stack)


def check_options(stack: Stack) -> None:
    """Refuse options of layers that Luna's layers of *stack* do not have."""
    flag = f"--{stack.side}-attn luna"
    if stack.qk_norm:
        raise UsageError(f"--qk-norm is not supported with {flag}: leave one of them out")
    if stack.kv_heads not in (None, stack.heads):
        raise UsageError(f"--decoder-kv-heads is not supported with {flag}: leave one of them out")
    init = stack.init.method
    if init.connects or not init.layer_norm:
        raise UsageError(
            f"--deep-init {stack.init.name} has no rule for the packed sequence of {flag}: use xavier, ds or lipschitz"
        )


class PackedSourceAttention(MultiheadAttention):
    """Attention to the packed source p~: to the lower half of a memory of :class:`LunaMemory`."""

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().project_memory(memory.chunk(2)[1])


def causal_means(x: Tensor, y: Tensor, z: Tensor, count: Tensor) -> Tensor:
    """1/n_t sum_{i<=t} (x_t . y_i) z_i, ... x T x E, in O(T).

    Within a block of positions it is a product with a triangular matrix. What came before is a sum in fp32 at least.

    Args:
        x, y: ... x T x D
        z: ... x T x E
        count: n, B x 1 x T x 1
    """
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    block = x.size(-2) if is_compiling() else BLOCK
    found, total, share = [], None, (1 / count).to(x.dtype)
    for each in zip(*(tensor.split(block, dim=-2) for tensor in (x, y, z, share, count))):
        a, b, c, part, n = each
        means = torch.matmul(torch.matmul(a, b.transpose(-1, -2)).tril() * part, c)
        if total is not None:  # as a mean, which half precision can hold
            means = means + torch.matmul(a, (total / before).to(a.dtype)) * (before / n).to(a.dtype)
        found.append(means)
        if len(found) * block < x.size(-2):
            own = torch.matmul(b.transpose(-1, -2), c / BLOCK).to(wide) * BLOCK
            total, before = own if total is None else total + own, n[:, :, -1:]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-2)


class LunaCausalAttention(MultiheadAttention):
    """The causal linear attention in place of self-attention.

    Positions of padding leave the sums as they are.

    Args:
        stack: the decoder
        bias: whether the projections have one
        length: rows l of p

    Attributes:
        reads_memory: :meth:`forward` gets the layer's memory, whose upper half is p
    """

    reads_memory = True

    def __init__(self, stack: Stack, bias: bool, length: int):
        super().__init__(stack.dim, stack.heads, kdim=stack.dim, bias=bias, **attention_options(stack))
        self.pq_proj, self.pc_proj = (nn.Linear(stack.dim, stack.dim, bias=bias) for _ in "pc")
        for proj in (self.pq_proj, self.pc_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
        self.sums = HypothesisState("luna_sums", width=2 * stack.dim * length, counts_words=True)

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        step: DecodingStep | None = None,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the contract is that of self-attention in :class:`MultiheadAttention`.

        Args:
            query: T x B x C
            key_padding_mask: B x T, true where *query* is padding
            attn_mask: any is the causal one
            incremental_state: has what came before *query* (one position), and then also *query*
            step: what :class:`SharedBeamState` gives in incremental decoding, instead of *key_padding_mask*
            causal: no position sees later ones
            memory: 2l x sources x C, with p as its upper half; not read where *incremental_state* has p's projection
            memory_padding: B x l, true where a row of p is not used; or what :func:`padding_bias` makes of that

        Returns:
            T x B x C, and None

        Raises:
            UsageError: positions are to see later ones
        """
        if not causal and attn_mask is None and incremental_state is None:
            raise UsageError("--decoder-attn luna does not see later positions: omit full_context_alignment")
        projections = (self.q_proj, self.k_proj, self.v_proj, self.pc_proj)
        q, k, v, c = (self._split_heads(project(query), query.size(1)) for project in projections)
        q = q * self.head_dim**-0.5
        pq, _, bias = self._of_memory(q, memory, memory_padding, incremental_state)
        copies = query.size(1) // pq.size(0)
        if copies > 1:  # hypotheses of a sentence
            pq = pq.repeat_interleave(copies, dim=0)
            bias = None if bias is None else bias.repeat_interleave(copies, dim=0)
        scores = torch.matmul(c, pq.transpose(-1, -2)) * self.head_dim**-0.5
        alpha = F.softplus(scores, beta=math.log(2.0)).to(q.dtype)
        if incremental_state is None:
            x = self._whole(q, k, v, alpha, bias, key_padding_mask)
        else:
            assert step is not None, "a step of incremental decoding needs what SharedBeamState gives"
            x = self._step(q, k, v, alpha, bias, incremental_state, step)
        x = x.to(q.dtype).permute(2, 0, 1, 3).flatten(2)
        return self.project_output(x, query, None), None

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        p = memory.chunk(2)[0]
        return self._split_heads(self.pq_proj(p), p.size(1)), None

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, bias: Tensor | None, padding: Tensor | None):
        """Outputs of the heads for all positions, B x H x T x D."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if padding is None:
            count = torch.arange(1, q.size(2) + 1, device=q.device, dtype=wide).view(1, 1, -1, 1)
        else:
            words = padding.logical_not().view(padding.size(0), 1, -1, 1)
            alpha = alpha * words
            count = words.to(wide).cumsum(2).clamp(min=1.0)
        alpha = self._drop(alpha)
        weights = self._weights(causal_means(q, k, alpha, count), bias)
        return causal_means(weights, alpha, v, count)

    def _step(self, q, k, v, alpha, bias, incremental_state, step: DecodingStep) -> Tensor:
        """Outputs of the heads for the next position, B x H x 1 x D."""
        count = step.count
        assert count is not None
        shape = (k.size(0), 2, k.size(1), k.size(3), alpha.size(3))
        own = torch.stack([k, v], dim=1).transpose(-1, -2).to(count.dtype) * self._drop(alpha).unsqueeze(1)
        own = own.flatten(1).unsqueeze(0)
        total = torch.addcmul(self.sums.previous(incremental_state, own, count.dtype), own, step.words.to(own.dtype))
        self.sums.keep(incremental_state, total)
        keys, values = (total / count).to(q.dtype).view(shape).unbind(1)
        return torch.matmul(self._weights(torch.matmul(q, keys), bias), values.transpose(-1, -2))

    def _weights(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """w: softmax in fp32 at least, with dropout."""
        scores = scores if bias is None else scores + bias
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return self._drop(torch.softmax(wide, dim=-1).to(scores.dtype))

    def _drop(self, x: Tensor) -> Tensor:
        if not self.dropout or not (self.training or self.retain_dropout):
            return x
        return fast_dropout(x, self.dropout) if self.fast_dropout else F.dropout(x, self.dropout)


@DECODER_ATTENTIONS.register("luna")
class LunaThenSource(SelfThenSource):
    """Causal linear attention, then attention to the packed source.

    Args:
        length: rows l of p, which is the encoder's
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
        if not stack.cross_attention:
            raise UsageError("--no-cross-attention is not supported with --decoder-attn luna: leave one of them out")
        check_options(stack)

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return LunaCausalAttention(stack, bias, self.length)

    def source(self, stack: Stack, bias: bool) -> MultiheadAttention:
        return PackedSourceAttention(stack.dim, stack.heads, kdim=stack.dim, bias=bias, **attention_options(stack))
