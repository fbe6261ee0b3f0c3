"""Residual connections of a layer, r = x + F(x), and what some initialisations make of them.

    plain      r = x + F(x)
    constant   r = alpha x + F(x)            DeepNet (Wang et al., 2022)
    vector     r = omega * x + F(x)          Admin (Liu et al., 2020); omega is learned, one value a feature
    gate       r = x + a F(x)                ReZero (Bachlechner et al., 2020); a is learned, one for all of a layer

Dropout is part of F.
"""

import torch
from torch import Tensor, nn

from ..inits import Connection


class ResidualConnection(nn.Module):
    """The residual connections of all sub-layers of one layer.

    Args:
        connection: kind and start value
        dim: width C
        sublayers: number of sub-layers

    Shapes:
        weight: sublayers x C ("vector") or 1 ("gate"); not there otherwise
    """

    def __init__(self, connection: Connection, dim: int, sublayers: int):
        super().__init__()
        self.kind = connection.kind
        self.value = connection.value
        shape = {"vector": (sublayers, dim), "gate": (1,)}.get(self.kind)
        self.weight = None if shape is None else nn.Parameter(torch.full(shape, connection.value))

    def forward(self, x: Tensor, output: Tensor, sublayer: int) -> Tensor:
        """r (T x B x C) of the input *x* and the *output* F(x) of the sub-layer with the index *sublayer*."""
        weight = self.weight
        if weight is None:
            return x + output if self.value == 1.0 else self.value * x + output
        if self.kind == "gate":
            return x + weight * output
        return weight[sublayer] * x + output
