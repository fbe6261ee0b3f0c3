"""Plain residual connection, r = x + F.

Deep Residual Learning for Image Recognition, He et al., 2016, Eq. (1).
"""

import torch
from torch import Tensor

from .base import RESIDUALS, ResidualConnection


@RESIDUALS.register("plain")
class Plain(ResidualConnection):
    """x + F(x)."""

    paper = "He 2016"
    foldable = True

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        return 1.0, 1.0

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != output.dtype:
            return x + output
        return output.add_(x)
