"""Multi-head attention, with optional relative positions.

Attention Is All You Need, Vaswani et al., 2017, Section 3.2:

    head = softmax(q k^T / sqrt(D)) v          Eq. (1), for each of H heads of width D = C / H

Self-Attention with Relative Position Representations, Shaw et al., 2018, adds a learned vector to each key (its Eq. 4;
not to the values, which the parameter counts of Xu et al., 2024, leave out):

    score(i, j) = q_i (k_j + a_(j - i))^T / sqrt(D)

Names here: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` as in fairseq; ``relative_keys`` holds the vectors a, which
all heads share: those of the distances -K ... K, clipped, or where no position sees later ones, of -(K+1) ... 0.
"""

from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import SourceCache, TargetCache


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float
) -> Tuple[Tensor, Tensor]:
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    return torch.matmul(F.dropout(weights.to(q.dtype), dropout), v), weights.float()


if hasattr(F, "scaled_dot_product_attention"):  # torch 2.0

    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

else:

    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float) -> Tensor:
        return _explicit(q, k, v, bias, dropout)[0]


@torch.no_grad()
def join_linear(parts: List[nn.Linear]) -> nn.Linear:
    """One matrix product for several of the same input: its output has theirs one after the other.

    The parts keep their weights, as views of the whole.
    """
    first = parts[0]
    bias = first.bias is not None
    joined = nn.Linear(first.in_features, sum(part.out_features for part in parts), bias=bias)
    joined = joined.to(first.weight).requires_grad_(False)
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        start = rows.stop
        for whole, own in ((joined.weight, part.weight), (joined.bias, part.bias)):
            if own is not None:
                whole[rows] = own
                own.data = whole[rows]
    return joined


def _put_in_joined(state: Dict[str, Tensor], prefix: str, *args) -> None:
    for part in ("weight", "bias"):
        own = [state.get(f"{prefix}{name}_proj.{part}") for name in "qkv"]
        if all(value is not None for value in own):
            state[f"{prefix}qkv_proj.{part}"] = torch.cat(own)


def _leave_out_joined(module: nn.Module, state: Dict[str, Tensor], prefix: str, metadata) -> None:
    for part in ("weight", "bias"):
        state.pop(f"{prefix}qkv_proj.{part}", None)


class MultiheadAttention(nn.Module):
    """Attention of T x B x C queries to themselves and what came before, or to a memory.

    Args:
        dim: width C
        num_heads: number of heads H, a divisor of *dim*
        kdim: width of the memory; None for self-attention
        dropout: probability of dropout on the attention weights
        bias: whether the four projections have one
        relative_positions: the clipping distance K of relative positions (self-attention only); None for none
        causal: no position sees later ones, so that only they need relative positions
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kdim: Optional[int] = None,
        dropout: float = 0.0,
        bias: bool = True,
        relative_positions: Optional[int] = None,
        causal: bool = False,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.retain_dropout = False
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(kdim or dim, dim, bias=bias)
        self.v_proj = nn.Linear(kdim or dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.of_memory = kdim is not None
        self.idle: Tuple[str, ...] = ()  # matrices that generation does not use: they have become parts of qkv_proj
        self.qkv_proj: Optional[nn.Linear] = None  # in generation, the three in one
        self.relative_keys: Optional[nn.Parameter] = None
        self.farthest = 0
        if relative_positions is not None:
            # K+2 vectors where none looks ahead: the last is of all that is farther than K
            self.farthest = relative_positions + 1 if causal else relative_positions
            rows = self.farthest + 1 + (0 if causal else self.farthest)
            self.relative_keys = nn.Parameter(torch.empty(rows, self.head_dim))
        self.own_cache = None if self.of_memory else TargetCache()
        self.memory_cache = SourceCache() if self.of_memory else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """fairseq's start values: Xavier, with gain 1/sqrt(2) for queries, keys and values of one width."""
        same = self.k_proj.in_features == self.q_proj.in_features
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5 if same else 1.0)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        if self.relative_keys is not None:
            nn.init.xavier_uniform_(self.relative_keys)

    def forward(
        self,
        query: Tensor,
        memory: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        need_weights: bool = False,
        added: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Attend.

        Args:
            query: T x B x C
            memory: S x B x kdim; None for self-attention
            key_padding_mask: B x S, true where the keys are padding
            attn_mask: T x S, added to the scores; or in a step of incremental decoding what :class:`Ancestry` gives,
                which hides padding, too: then keys and values are kept for all hypotheses of a sentence together
            incremental_state: caches of all attentions. Self-attention appends to its keys and values; those of a
                memory are computed at the first step.
            need_weights: also return the attention weights
            added: T x B x C, added to what the heads give before the output projection

        Returns:
            T x B x C, and the weights (H x B x T x S, fp32) or None
        """
        if memory is None:
            beams = attn_mask if attn_mask is not None and attn_mask.dim() == 4 else None
            q, key, value, padding = self._own(query, key_padding_mask, incremental_state, beams)
            bias = self._bias(q, key, self._padding_bias(padding, q), attn_mask)
        else:
            q = self.q_proj(query)
            key, value, bias = self._of_memory(q, memory, key_padding_mask, incremental_state)
            q = self._split_heads(q, key.size(0))
            bias = self._bias(q, key, bias, attn_mask)
        dropout = self.dropout if self.training or self.retain_dropout else 0.0
        weights: Optional[Tensor] = None
        # for the few queries of a decoding step, plain products are faster on a CPU
        if need_weights or (incremental_state is not None and not q.is_cuda):
            x, explicit_weights = _explicit(q, key, value, bias, dropout)
            if need_weights:
                weights = self._per_hypothesis(explicit_weights, query.size(0)).permute(2, 0, 1, 3, 4).flatten(1, 2)
        else:
            x = _attend(q, key, value, bias, dropout)
        x = self._per_hypothesis(x, query.size(0)).permute(3, 0, 1, 2, 4).reshape(query.shape)
        if added is not None:
            x = x + added
        return self.out_proj(x), weights

    def _split_heads(self, x: Tensor, sources: int) -> Tensor:
        """T x B x C -> sources x H x (B/sources * T) x D: hypotheses of one source are queries to the same keys."""
        x = x.view(x.size(0), sources, -1, self.num_heads, self.head_dim)
        return x.permute(1, 3, 2, 0, 4).flatten(2, 3)

    def _per_hypothesis(self, x: Tensor, length: int) -> Tensor:
        """sources x H x (beam * T) x D -> sources x beam x H x T x D."""
        return x.view(x.size(0), x.size(1), -1, length, x.size(3)).transpose(1, 2)

    def _own(
        self,
        query: Tensor,
        padding: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
        beams: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
        """Queries, and keys and values (B x H x S x D) of all positions so far, with their padding (B x S).

        With *beams*, B are the sentences, and the queries and a position's keys those of all hypotheses.
        """
        length, batch = query.size(0), query.size(1)
        if beams is not None:
            batch, padding = beams.size(0), None
        if self.qkv_proj is not None and not torch.is_grad_enabled():
            qkv = self.qkv_proj(query).view(length, batch, -1, 3, self.num_heads, self.head_dim)
            qkv = qkv.permute(3, 1, 4, 2, 0, 5).flatten(3, 4)
            q, kv = qkv[0], qkv[1:]
        else:
            q = self._split_heads(self.q_proj(query), batch)
            k, v = self._split_heads(self.k_proj(query), batch), self._split_heads(self.v_proj(query), batch)
            if incremental_state is None:
                return q, k, v, padding
            kv = torch.stack([k, v])
        if incremental_state is not None and self.own_cache is not None:
            kv, padding = self.own_cache(incremental_state, kv, padding, beams)
        return q, kv[0], kv[1], padding

    def _of_memory(
        self,
        q: Tensor,
        memory: Tensor,
        padding: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Keys and values (sources x H x S x D) of the memory, and what padding adds to the scores.

        They are computed at the first step of incremental decoding.
        """
        if incremental_state is not None and self.memory_cache is not None:
            saved = self.memory_cache(incremental_state)
            if saved is not None:
                return saved
        sources = memory.size(1)
        key = self._split_heads(self.k_proj(memory), sources)
        value = self._split_heads(self.v_proj(memory), sources)
        bias = self._padding_bias(padding, q)
        if incremental_state is not None and self.memory_cache is not None:
            key, value = key.contiguous(), value.contiguous()
            self.memory_cache.keep(incremental_state, key, value, bias, q.size(1) // max(sources, 1))
        return key, value, bias

    def _padding_bias(self, padding: Optional[Tensor], q: Tensor) -> Optional[Tensor]:
        """What hides the keys under *padding* (B x S) from all queries: B x 1 x 1 x S."""
        if padding is None:
            return None
        hidden = torch.zeros(padding.shape, dtype=q.dtype, device=q.device).masked_fill(padding, float("-inf"))
        return hidden.view(hidden.size(0), 1, 1, hidden.size(1))

    def _bias(
        self, q: Tensor, key: Tensor, bias: Optional[Tensor], attn_mask: Optional[Tensor]
    ) -> Optional[Tensor]:
        """What is added to the scores, broadcastable to B x H x T x S: *bias*, the mask, and relative positions."""
        if attn_mask is not None:
            mask = attn_mask.to(q.dtype)
            bias = mask if bias is None else bias + mask
        relative_keys = self.relative_keys
        if relative_keys is not None:
            beam = attn_mask.size(2) if attn_mask is not None and attn_mask.dim() == 4 else 1
            last = key.size(2) // beam - 1  # with a cache, the queries are the last positions
            keys = torch.arange(last + 1, device=q.device).repeat_interleave(beam)
            queries = torch.arange(last + 1 - q.size(2) // beam, last + 1, device=q.device)
            rows = (keys - queries.unsqueeze(1)).clamp(-self.farthest, relative_keys.size(0) - 1 - self.farthest)
            scores = torch.matmul(q * self.head_dim**-0.5, relative_keys.t().to(q.dtype))
            index = (rows + self.farthest).expand(q.size(0), q.size(1), q.size(2), -1)
            relative = scores.gather(3, index)
            bias = relative if bias is None else relative + bias
        return bias

    def make_generation_fast_(
        self, name: str, retain_dropout: bool = False, retain_dropout_modules: Optional[List[str]] = None, **kwargs
    ) -> None:
        """fairseq's ``--retain-dropout``: keep dropout while translating."""
        named = retain_dropout_modules is None or "MultiheadAttention" in retain_dropout_modules
        self.retain_dropout = retain_dropout and named
        parts = [self.q_proj, self.k_proj, self.v_proj]
        if self.of_memory or self.qkv_proj is not None or not all(type(part) is nn.Linear for part in parts):
            return
        self.qkv_proj = join_linear(parts)
        self.idle = ("q_proj", "k_proj", "v_proj")
        self._register_state_dict_hook(_leave_out_joined)
        self._register_load_state_dict_pre_hook(_put_in_joined)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Take apart the fused projection of queries, keys and values that old fairseq versions have."""
        for part in ("weight", "bias"):
            fused = state_dict.pop(f"{name}.in_proj_{part}", None)
            if fused is not None:
                for proj, value in zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3)):
                    state_dict[f"{name}.{proj}.{part}"] = value
