"""Self-dependency units (SDU): a gated linear term of the input in parallel with each sub-layer.

Highway Transformer: Self-Gating Enhanced Self-Attentive Networks, Chai et al., ACL 2020:

    SDU(x) = psi(x W_1 + b_1) * (x W_2 + b_2),    psi the sigmoid s or tanh
    post-norm  x_{l+1} = LN(x_l + F(x_l) + SDU(x_l))
    pre-norm   x_{l+1} = x_l + F(LN(x_l)) + SDU(x_l)

In pre-norm the SDU reads the raw x, as in the authors' code, without dropout. The paper's best models have it only in
their lowest layers (``--sdu-layers``), and tanh in all layers is harmful there. Our default for psi is therefore the
sigmoid.

Names here: ``linears[sublayer]`` is [W_1; W_2] of one sub-layer, as one product.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection

ACTIVATIONS = ("sigmoid", "tanh")


def gate_linears(dim: int, sublayers: int) -> nn.ModuleList:
    """Build a linear layer C -> 2C for each sub-layer, [x W_1 + b_1; x W_2 + b_2], with torch's initialisation."""
    return nn.ModuleList([nn.Linear(dim, 2 * dim) for _ in range(sublayers)])


def gate_matrices(linears: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return W_1 ("gate_N") and W_2 ("value_N") of each sub-layer N, as views of the parameter."""
    matrices: dict[str, Tensor] = {}
    for index, linear in enumerate(linears):
        matrices[f"gate_{index}"], matrices[f"value_{index}"] = linear.weight.detach().chunk(2)
    return matrices


@RESIDUALS.register("sdu")
class Sdu(ResidualConnection):
    """r = x + F + psi(x W_1 + b_1) * (x W_2 + b_2).

    Args:
        stack, number: see :class:`ResidualConnection`
        activation: psi, "sigmoid" or "tanh"
        layers: number of the lowest layers with an SDU; layers above are plain, without parameters; None: all

    Shapes:
        linears[sublayer].weight: 2C x C, W_1 above W_2

    Raises:
        UsageError: a value is out of range
    """

    paper = "Chai 2020"
    counts_layers = True
    options = {
        "activation": Option("psi", ACTIVATIONS),
        "layers": Option("SDU in the N lowest layers (default: all)", Range(1)),
    }

    def __init__(self, stack: Stack, number: int, activation: str = "sigmoid", layers: int | None = None):
        super().__init__(stack, number)
        self.sigmoid = activation == "sigmoid"
        self.linears = gate_linears(stack.dim, self.sublayers if layers is None or number <= layers else 0)

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        layers = options.get("layers")
        depths = [one.layers for one in (stack, other) if one.residual is not None and one.residual.method is cls]
        if layers is not None and depths and layers > max(depths):
            raise UsageError(
                f"--sdu-layers {layers} exceeds the {max(depths)} layers: omit it for an SDU in all layers"
            )

    def matrices(self) -> dict[str, Tensor]:
        return gate_matrices(self.linears)

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        r = x + output
        if self.linears:
            gate, value = self.linears[sublayer](x).chunk(2, dim=-1)
            gate = torch.sigmoid(gate) if self.sigmoid else torch.tanh(gate)
            r = r + gate * value
        return r.to(x.dtype)
