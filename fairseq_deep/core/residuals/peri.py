"""Peri-LN: a sub-layer's output is also normalised before it is added.

Peri-LN: Revisiting Normalization Layer in the Transformer Architecture, Kim et al., ICML 2025:

    x_{l+1} = x_l + LN(F(LN(x_l)))

in a pre-norm stack; the inner norm is the stack's own. Each sub-layer has an outer norm with an initial gain of 1.
Dropout is part of F, and therefore comes before the outer norm.

Names here: ``layer_norms[sublayer]`` is the outer LN.
"""

from torch import Tensor, nn

from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection


@RESIDUALS.register("peri")
class PeriNorm(ResidualConnection):
    """r = x + LN(F)."""

    paper = "Kim 2025"
    architectures = {"peri_18l18l": ("pre", (18, 18), {})}
    norms = ("pre",)

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.layer_norms = nn.ModuleList([make_norm(stack) for _ in range(self.sublayers)])

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return (x + self.layer_norms[sublayer](output)).to(x.dtype)
