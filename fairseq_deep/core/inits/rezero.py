"""ReZero: layers without norms, behind a gate that is initially closed.

ReZero is All You Need, Bachlechner et al., 2020:

    x_{l+1} = x_l + a F(x_l)

with a learned and initially 0, shared by the sub-layers of each layer. Matrices are initialised like in ``xavier.py``.

Names here: ``weight`` is a.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base import INITS
from .xavier import Xavier


class GatedConnection(ResidualConnection):
    """r = x + a F(x)."""

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return x + self.weight * output


@INITS.register("rezero")
class ReZero(Xavier):
    """ReZero."""

    paper = "Bachlechner 2020"
    norms = ("post",)
    layer_norm = False
    without_residual = False
    connects = True

    def connection(self, number: int) -> ResidualConnection:
        return GatedConnection(self.stack, number)
