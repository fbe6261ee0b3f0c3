"""Average attention: a mean in place of self-attention.

Accelerating Neural Transformer via an Average Attention Network, Zhang, Xiong and Su, ACL 2018. With x_t the input at
position t of the target:

    g_t      = FFN( 1/t sum_{k<=t} x_k )         the FFN is omitted without ``--average-ffn``
    i_t, f_t = sigmoid(W [x_t ; g_t])
    h_t      = i_t * x_t + f_t * g_t

A running sum takes O(T) in training, and its state in decoding is one vector.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.xavier import fill_xavier

from .beam_reorder import IncrementalState
from .beams import DecodingStep
from .context import LayerContext
from .hypothesis_state import HypothesisState
from .target import TargetAttention


class RunningMean(HypothesisState):
    """Mean over each position and all earlier ones.

    Sums are at least in fp32: the mean of a thousand positions in half precision is then exact to its last digit.
    In incremental decoding, the state is one sum per hypothesis, independent of its length.
    """

    def __init__(self):
        super().__init__("running_sum", counts_words=True)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """Compute the mean.

        Args:
            x: T x B x C
            context: its padding is not counted. If nothing hides later positions, each gets the mean over all. With a
                cache, the call adds *x* (one position) to the sum over earlier ones

        Returns:
            T x B x C
        """
        if context.cache is not None:
            assert context.step is not None, "incremental decoding requires the output of SharedBeamState"
            return self._next(x, context.cache, context.step)
        wide = widened(x)
        if context.padding is None:
            count = torch.arange(1, x.size(0) + 1, device=x.device, dtype=wide.dtype).view(-1, 1, 1)
        else:
            words = context.padding.t().logical_not().unsqueeze(-1)
            wide = wide * words
            count = words.to(wide.dtype).cumsum(0).clamp(min=1.0)
        total = wide.cumsum(0)
        if not context.hides_later:
            total, count = total[-1:].expand_as(x), count[-1:]
        return (total / count).to(x.dtype)

    def _next(self, x: Tensor, incremental_state: IncrementalState, step: DecodingStep) -> Tensor:
        """Return the mean up to the position *x* (1 x B x C)."""
        count = step.count
        total = torch.addcmul(self.previous(incremental_state, x, count.dtype), x, step.words)
        self.keep(incremental_state, total)
        if torch.is_grad_enabled():
            return (total / count).to(x.dtype)
        return torch.div(total, count, out=torch.empty_like(x))


class AverageAttention(TargetAttention):
    """Gated mean over earlier positions, in place of a causal self-attention.

    Args:
        dim: width C
        ffn_dim: width of the FFN on the mean; None for no FFN
        dropout: probability of dropout in the FFN
    """

    method, full_context = "average", True

    def __init__(self, dim: int, ffn_dim: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.mean = RunningMean()
        self.fc1 = self.fc2 = None
        if ffn_dim is not None:
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.dropout_module = dropout_of(self, dropout)
        self.gate = nn.Linear(2 * dim, 2 * dim)
        fill_xavier(self.gate)

    def whole(self, x: Tensor, context: LayerContext) -> Tensor:
        mean = self.mean(x, context)
        if self.fc1 is not None:
            mean = self.fc2(self.dropout_module(torch.relu(self.fc1(mean))))
        input_gate, forget_gate = torch.sigmoid(self.gate(torch.cat([x, mean], dim=-1))).chunk(2, dim=-1)
        return torch.addcmul(input_gate * x, forget_gate, mean)

    next = whole
