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

from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.stack import Stack
from fairseq_deep.core.xavier import fill_xavier

from .context import LayerContext
from .decoder import DECODER_ATTENTIONS, SelfThenSource
from .hypothesis_state import HypothesisState
from .scan import gated_recurrence
from .target import TargetAttention


class Ssru(TargetAttention, HypothesisState):
    """SSRU in place of a causal self-attention.

    States are at least in fp32. Positions of padding do not change the state.

    Args:
        dim: width C
    """

    method = "ssru"

    def __init__(self, dim: int):
        super().__init__("recurrent_state")
        self.gate = nn.Linear(dim, dim)
        self.input_proj = nn.Linear(dim, dim, bias=False)
        fill_xavier(self.gate, self.input_proj)

    def whole(self, x: Tensor, context: LayerContext) -> Tensor:
        z, v, dtype = self._inputs(x)
        if context.padding is not None:
            z = z.masked_fill(context.padding.t().unsqueeze(-1), float("inf"))
        return torch.relu(gated_recurrence(z, v).to(dtype))

    def next(self, x: Tensor, context: LayerContext) -> Tensor:
        z, v, dtype = self._inputs(x)
        before = self.previous(context.cache, v, v.dtype)
        c = torch.where(context.step.words, torch.lerp(v, before, torch.sigmoid(z)), before)
        self.keep(context.cache, c)
        return torch.relu(c.to(dtype))

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        """Return the gates before the sigmoid and W x, at least in fp32, and the type of W x."""
        gates, values = self.gate(x), self.input_proj(x)
        return widened(gates), widened(values), values.dtype


@DECODER_ATTENTIONS.register("ssru")
class SsruThenSource(SelfThenSource):
    """SSRU, then attention to the source."""

    relative = False
    full_context = False
    paper = "Kim 2019"
    architectures = {
        "ssru_6l": ("pre", (6, 6), {}),
        "ssru_12l1l": ("pre", (12, 1), {}),
    }

    def target(self, stack: Stack, bias: bool) -> nn.Module | None:
        return Ssru(stack.dim)
