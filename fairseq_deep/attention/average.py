"""Average attention: a mean in place of self-attention.

Accelerating Neural Transformer via an Average Attention Network, Zhang, Xiong and Su, ACL 2018. With x_t the input at
position t of the target:

    g_t      = FFN( 1/t sum_{k<=t} x_k )         the FFN is left out unless ``--average-ffn`` asks for it
    i_t, f_t = sigmoid(W [x_t ; g_t])
    h_t      = i_t * x_t + f_t * g_t

A running sum makes it O(T) in training, and one vector of state in decoding.
"""

import uuid
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RunningMean(nn.Module):
    """Mean over each position and those before it.

    Sums are in fp32 at least, so that the mean of a thousand positions in half precision is exact to its last digit.
    In incremental decoding the state is a sum and a count for each hypothesis, whatever its length.
    """

    def __init__(self):
        super().__init__()
        self._state = f"{uuid.uuid4()}.running_sum"

    def forward(
        self,
        x: Tensor,
        padding_mask: Optional[Tensor] = None,
        causal: bool = True,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
    ) -> Tensor:
        """Average.

        Args:
            x: T x B x C
            padding_mask: B x T, true where *x* is padding, which does not count
            causal: positions do not see later ones; else each gets the mean over all
            incremental_state: what came before *x*, and then with *x*

        Returns:
            T x B x C
        """
        wide = x if x.dtype == torch.float64 else x.float()
        if padding_mask is None:
            count = torch.arange(1, x.size(0) + 1, device=x.device, dtype=wide.dtype).view(-1, 1, 1)
            count = count.expand(-1, x.size(1), 1)
        else:
            words = padding_mask.t().logical_not().unsqueeze(-1)
            wide = wide * words
            count = words.to(wide.dtype).cumsum(0)
        total = wide.cumsum(0) if x.size(0) > 1 else wide
        if incremental_state is not None:
            if self._state in incremental_state:
                saved = incremental_state[self._state]
                old_total, old_count = saved["total"], saved["count"]
                if old_total is not None and old_count is not None:
                    total, count = total + old_total, count + old_count
            state: Dict[str, Optional[Tensor]] = {"total": total[-1].clone(), "count": count[-1].clone()}
            incremental_state[self._state] = state
        if not causal:
            total, count = total[-1:].expand_as(x), count[-1:]
        return (total / count.clamp(min=1.0)).to(x.dtype)

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]], new_order: Tensor
    ) -> Dict[str, Dict[str, Optional[Tensor]]]:
        """Take over the sums of the hypotheses *new_order* (B), as fairseq's beam search asks for."""
        if self._state in incremental_state:
            reordered: Dict[str, Optional[Tensor]] = {}
            for name, saved in incremental_state[self._state].items():
                reordered[name] = saved.index_select(0, new_order) if saved is not None else None
            incremental_state[self._state] = reordered
        return incremental_state


class AverageAttention(nn.Module):
    """The mean of what came before, gated; takes the place of a causal self-attention.

    Args:
        dim: width C
        ffn_dim: width of the FFN on the mean; None leaves it out
        dropout: probability of dropout in the FFN
    """

    def __init__(self, dim: int, ffn_dim: Optional[int] = None, dropout: float = 0.0):
        super().__init__()
        self.mean = RunningMean()
        self.fc1 = self.fc2 = None
        if ffn_dim is not None:
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.dropout = dropout
        self.retain_dropout = False
        self.gate = nn.Linear(2 * dim, 2 * dim)
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        query: Tensor,
        memory: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        need_weights: bool = False,
        beam_mask: Optional[Tensor] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Average; the contract is that of self-attention in :class:`MultiheadAttention`.

        Args:
            query: T x B x C
            memory: None
            key_padding_mask: B x T, true where *query* is padding
            attn_mask: any is the causal one
            incremental_state: see :class:`RunningMean`
            need_weights: not used, there are none
            beam_mask: not used: each hypothesis keeps a sum of its own
            causal: no position sees later ones

        Returns:
            T x B x C, and None
        """
        causal = causal or attn_mask is not None or incremental_state is not None
        mean = self.mean(query, key_padding_mask, causal, incremental_state)
        if self.fc1 is not None and self.fc2 is not None:
            kept = self.training or self.retain_dropout
            mean = self.fc2(F.dropout(torch.relu(self.fc1(mean)), self.dropout, kept))
        input_gate, forget_gate = torch.sigmoid(self.gate(torch.cat([query, mean], dim=-1))).chunk(2, dim=-1)
        return input_gate * query + forget_gate * mean, None

    def make_generation_fast_(
        self, name: str, retain_dropout: bool = False, retain_dropout_modules: Optional[List[str]] = None, **kwargs
    ) -> None:
        """fairseq's ``--retain-dropout``: keep dropout while translating."""
        named = retain_dropout_modules is None or "AverageAttention" in retain_dropout_modules
        self.retain_dropout = retain_dropout and named
