"""Value residual: self-attention also reads the values of the first layer.

Value Residual Learning, Zhou et al., 2024 (ResFormer), with learned weights:

    V'_1 = V_1,    V'_l = a_l V_1 + b_l V_l    for l = 2 ... L,    a_l = b_l = 0.5 initially

V_l are the values that layer l computes from its own input. Attention, and therefore the KV cache, uses V'_l instead.

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
        """Return V' (B x H x T x D) for the layer's *own* values and the values of the *first* layer."""
        # one weight per feature: fp16 then accumulates gradients per feature, not over all features
        of_first, of_own = self.weight.unsqueeze(1).expand(2, own.size(-1)).to(own.dtype).unbind()
        return torch.addcmul(own * of_own, first, of_first)


class FirstValues:
    """Holds the values of the first layer of a stack during a forward pass.

    Attributes:
        first: B x H x T x D. Recomputing a layer in the backward pass sets them again, to the same values.
    """

    def __init__(self):
        self.first: Tensor | None = None

    def mix(self, own: Tensor, residual: ValueResidual | None) -> Tensor:
        """Return the values that a layer attends to; *own* (B x H x T x D) without *residual*, in the first layer."""
        if residual is None:
            self.first = own
            return own
        assert self.first is not None, "the first layer runs before all others"
        return residual(own, self.first)
