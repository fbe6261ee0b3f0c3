"""Norms of layers and stacks (``--norm``): LayerNorm or RMSNorm.

Layer Normalization, Ba et al., 2016, and Root Mean Square Layer Normalization, Zhang and Sennrich, NeurIPS 2019, Eq. 4:

    LN(x)  = (x - mean(x)) / sqrt(var(x) + eps) * g + b
    RMS(x) = x / sqrt(mean(x^2) + eps) * g

over the features of a position. Statistics are in fp32 at least.

Names here: ``weight`` is g, ``bias`` is b.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stack import Stack

NORMS = ("layer", "rms")
"""The values of ``--norm``."""


class RmsNorm(nn.Module):
    """RMS(x) over the last dimension.

    Args:
        dim: its size
        eps: added to the mean of squares
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (... x C)."""
        if hasattr(F, "rms_norm") and x.dtype == self.weight.dtype:
            return F.rms_norm(x, (self.dim,), self.weight, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def make_norm(stack: Stack, dim: int | None = None) -> nn.Module:
    """A norm of the kind that *stack* has, over *dim* features (default: its width)."""
    dim = stack.dim if dim is None else dim
    return RmsNorm(dim) if stack.norm == "rms" else nn.LayerNorm(dim)
