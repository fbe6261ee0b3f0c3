"""SSRU: a recurrence in place of self-attention.

From Research to Production and Back: Ludicrously Fast Neural Machine Translation, Kim et al., WNGT 2019 (the "simpler
simple recurrent unit", also in Marian). With x_t the input at position t of the target and c_0 = 0:

    f_t = sigmoid(W_f x_t + b_f)
    c_t = f_t * c_{t-1} + (1 - f_t) * W x_t
    h_t = relu(c_t)

In training, a scan computes all positions; in decoding, the state is one vector per hypothesis.

Here W_f and b_f are ``gate``, and W is ``input_proj``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .beams import DecodingStep
from .decoder import DECODER_ATTENTIONS, SelfThenSource
from .hypothesis_state import HypothesisState
from .scan import gated_recurrence


class Ssru(HypothesisState):
    """SSRU in place of a causal self-attention.

    States are at least in fp32. Positions of padding do not change the state.

    Args:
        dim: width C
    """

    def __init__(self, dim: int):
        super().__init__("recurrent_state")
        self.gate = nn.Linear(dim, dim)
        self.input_proj = nn.Linear(dim, dim, bias=False)
        for linear in (self.gate, self.input_proj):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        step: DecodingStep | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence; the arguments are the same as for self-attention in :class:`MultiheadAttention`.

        Args:
            query: T x B x C
            key_padding_mask: B x T, true where *query* is padding
            attn_mask: any mask is treated as causal
            incremental_state: stores the state of earlier positions; the call adds *query* (one position)
            step: output of :class:`SharedBeamState` in incremental decoding, replaces *key_padding_mask*
            causal: no position sees later ones

        Returns:
            T x B x C, and None

        Raises:
            UsageError: neither *causal* nor *attn_mask* hides later positions
        """
        if not causal and attn_mask is None and incremental_state is None:
            raise UsageError("--decoder-attn ssru does not see later positions: omit full_context_alignment")
        gates, values = self.gate(query), self.input_proj(query)
        wide = torch.promote_types(values.dtype, torch.float32)
        z, v = gates.to(wide), values.to(wide)
        if incremental_state is not None:
            assert step is not None, "incremental decoding requires the output of SharedBeamState"
            before = self.previous(incremental_state, v, wide)
            c = torch.where(step.words, torch.lerp(v, before, torch.sigmoid(z)), before)
            self.keep(incremental_state, c)
        else:
            if key_padding_mask is not None:
                z = z.masked_fill(key_padding_mask.t().unsqueeze(-1), float("inf"))
            c = gated_recurrence(z, v)
        return torch.relu(c.to(values.dtype)), None


@DECODER_ATTENTIONS.register("ssru")
class SsruThenSource(SelfThenSource):
    """SSRU, then attention to the source."""

    relative = False
    full_context = False
    paper = "Kim 2019"

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return Ssru(stack.dim)
