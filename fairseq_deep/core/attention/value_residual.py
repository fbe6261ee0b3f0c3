"""Value residual: self-attention also reads the values of the first layer.

Value Residual Learning, Zhou et al., 2024 (ResFormer), with learned weights:

    V'_1 = V_1,    V'_l = a_l V_1 + b_l V_l    for l = 2 ... L,    a_l = b_l = 0.5 at the start

V_l are the values that layer l computes from its own input. Attention, and so the cache of incremental decoding, has
V'_l in their place.

Names here: ``weight`` holds a_l and b_l.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import KeepFp32


class ValueResidual(KeepFp32, nn.Module):
    """The weights of one layer above the first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, own: Tensor, first: Tensor) -> Tensor:
        """V' (B x H x T x D) of the layer's *own* values and those of the *first* layer."""
        # one weight per feature, so that what fp16 sums up is the gradient of a feature
        of_first, of_own = self.weight.unsqueeze(1).expand(2, own.size(-1)).to(own.dtype).unbind()
        return torch.addcmul(own * of_own, first, of_first)


class FirstValues:
    """The values of the first layer of a stack in one forward pass, from that layer on.

    Attributes:
        first: B x H x T x D. A layer that is recomputed in the backward pass sets them again, to the same values.
    """

    def __init__(self):
        self.first: Tensor | None = None

    def mix(self, own: Tensor, residual: ValueResidual | None) -> Tensor:
        """The values that a layer attends to; *own* (B x H x T x D) in the first layer, which has no *residual*."""
        if residual is None:
            self.first = own
            return own
        assert self.first is not None, "the first layer runs before all others"
        return residual(own, self.first)
