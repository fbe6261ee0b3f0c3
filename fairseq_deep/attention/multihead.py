"""Multi-head attention, with optional relative positions.

Attention Is All You Need, Vaswani et al., 2017, Section 3.2:

    head = softmax(q k^T / sqrt(D)) v          Eq. (1), for each of H heads of width D = C / H

Self-Attention with Relative Position Representations, Shaw et al., 2018, adds a learned vector to each key (its Eq. 4;
not to the values, which the parameter counts of Xu et al., 2024, leave out):

    score(i, j) = q_i (k_j + a_(j - i))^T / sqrt(D)

Names here: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` as in fairseq; ``relative_keys`` holds the vectors a, which
all heads share: those of the distances -K ... K, clipped, or where no position sees later ones, of -(K+1) ... 0.
"""

import uuid
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float
) -> Tuple[Tensor, Tensor]:
    scores = torch.matmul(q * q.size(-1) ** -0.5, k.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.matmul(F.dropout(weights.to(q.dtype), dropout), v), weights


if hasattr(F, "scaled_dot_product_attention"):  # torch 2.0

    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

else:

    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], dropout: float) -> Tensor:
        return _explicit(q, k, v, bias, dropout)[0]


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
        self.relative_keys: Optional[nn.Parameter] = None
        self.farthest = 0
        if relative_positions is not None:
            # K+2 vectors where none looks ahead: the last is of all that is farther than K
            self.farthest = relative_positions + 1 if causal else relative_positions
            rows = self.farthest + 1 + (0 if causal else self.farthest)
            self.relative_keys = nn.Parameter(torch.empty(rows, self.head_dim))
        self._state = f"{uuid.uuid4()}.attn_state"
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
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Attend.

        Args:
            query: T x B x C
            memory: S x B x kdim; None for self-attention
            key_padding_mask: B x S, true where the keys are padding
            attn_mask: T x S, added to the scores
            incremental_state: caches of all attentions. Self-attention appends to its keys and values; those of a
                memory are computed at the first step.
            need_weights: also return the attention weights

        Returns:
            T x B x C, and the weights (H x B x T x S, fp32) or None
        """
        key, value, key_padding_mask = self._keys_and_values(query, memory, key_padding_mask, incremental_state)
        q = self._split_heads(self.q_proj(query))
        bias = self._bias(q, key, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training or self.retain_dropout else 0.0
        weights: Optional[Tensor] = None
        if need_weights:
            x, explicit_weights = _explicit(q, key, value, bias, dropout)
            weights = explicit_weights.transpose(0, 1)
        else:
            x = _attend(q, key, value, bias, dropout)
        x = x.permute(2, 0, 1, 3).reshape(query.shape)  # B x H x T x D -> T x B x C
        return self.out_proj(x), weights

    def _split_heads(self, x: Tensor) -> Tensor:
        """T x B x C -> B x H x T x D."""
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _keys_and_values(
        self,
        query: Tensor,
        memory: Optional[Tensor],
        padding: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Keys and values (B x H x S x D) of all positions so far, and their padding (B x S)."""
        old_key: Optional[Tensor] = None
        old_value: Optional[Tensor] = None
        old_padding: Optional[Tensor] = None
        if incremental_state is not None and self._state in incremental_state:
            saved = incremental_state[self._state]
            old_key, old_value, old_padding = saved["prev_key"], saved["prev_value"], saved["prev_key_padding_mask"]
        if memory is not None and old_key is not None and old_value is not None:
            return old_key, old_value, old_padding

        source = query if memory is None else memory
        key, value = self._split_heads(self.k_proj(source)), self._split_heads(self.v_proj(source))
        if old_key is not None and old_value is not None:
            if old_padding is not None or padding is not None:
                new = key.new_zeros(key.size(0), key.size(2), dtype=torch.bool) if padding is None else padding
                if old_padding is None:
                    old_padding = torch.zeros(old_key.size(0), old_key.size(2), dtype=torch.bool, device=key.device)
                padding = torch.cat([old_padding, new], dim=1)
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        if incremental_state is not None:
            incremental_state[self._state] = {
                "prev_key": key,
                "prev_value": value,
                "prev_key_padding_mask": padding,
            }
        return key, value, padding

    def _bias(
        self, q: Tensor, key: Tensor, padding: Optional[Tensor], attn_mask: Optional[Tensor]
    ) -> Optional[Tensor]:
        """What is added to the scores, broadcastable to B x H x T x S."""
        bias: Optional[Tensor] = None
        if attn_mask is not None:
            bias = attn_mask.to(q.dtype)
        if padding is not None:
            hidden = torch.zeros(padding.shape, dtype=q.dtype, device=q.device).masked_fill(padding, float("-inf"))
            hidden = hidden.view(hidden.size(0), 1, 1, hidden.size(1))
            bias = hidden if bias is None else hidden + bias
        relative_keys = self.relative_keys
        if relative_keys is not None:
            last = key.size(2) - 1  # with a cache, the queries are the last positions
            keys = torch.arange(last + 1, device=q.device)
            queries = torch.arange(last + 1 - q.size(2), last + 1, device=q.device)
            rows = (keys - queries.unsqueeze(1)).clamp(-self.farthest, relative_keys.size(0) - 1 - self.farthest)
            scores = torch.matmul(q * self.head_dim**-0.5, relative_keys.t().to(q.dtype))
            index = (rows + self.farthest).expand(q.size(0), q.size(1), -1, -1)
            relative = scores.gather(3, index)
            bias = relative if bias is None else relative + bias
        return bias

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> Dict[str, Dict[str, Optional[Tensor]]]:
        """Take over the caches of the hypotheses *new_order* (B), as fairseq's beam search asks for."""
        if self._state in incremental_state:
            reordered: Dict[str, Optional[Tensor]] = {}
            for name, cached in incremental_state[self._state].items():
                reordered[name] = cached.index_select(0, new_order) if cached is not None else None
            incremental_state[self._state] = reordered
        return incremental_state

    def make_generation_fast_(
        self, name: str, retain_dropout: bool = False, retain_dropout_modules: Optional[List[str]] = None, **kwargs
    ) -> None:
        """fairseq's ``--retain-dropout``: keep dropout while translating."""
        named = retain_dropout_modules is None or "MultiheadAttention" in retain_dropout_modules
        self.retain_dropout = retain_dropout and named

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Take apart the fused projection of queries, keys and values that old fairseq versions have."""
        for part in ("weight", "bias"):
            fused = state_dict.pop(f"{name}.in_proj_{part}", None)
            if fused is not None:
                for proj, value in zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3)):
                    state_dict[f"{name}.{proj}.{part}"] = value
