"""Highway connections: a gate chooses between x, or F(x), and a linear map of x.

The two other self-gating forms of Highway Transformer: Self-Gating Enhanced Self-Attentive Networks, Chai et al., ACL
2020, which compares them with its SDU (``sdu.py``). With g = s(x W_1 + b_1) and v = x W_2 + b_2:

    gate        r = (1 - g) * x + F + g * v      the gate of Highway Networks (Srivastava et al., 2015) on x
    attention   r = x + (1 - g) * F + g * v      gated attention: the gate is on the sub-layer

As in the authors' code, both forms support post-norm and pre-norm, where g and v read the raw x, and v has a bias. All
sub-layers have the gate, in all layers.

Names here: ``linears[sublayer]`` is [W_1; W_2] of one sub-layer, as one product.
"""


import torch
from torch import Tensor

from fairseq_deep.core.fields import Option
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection
from .sdu import gate_linears, gate_matrices

FORMS = ("gate", "attention")


@RESIDUALS.register("highway")
class Highway(ResidualConnection):
    """r = x + F + g * (v - x), or with the form "attention" r = x + F + g * (v - F).

    Args:
        stack, number: see :class:`ResidualConnection`
        form: "gate" or "attention"

    Shapes:
        linears[sublayer].weight: 2C x C, W_1 above W_2

    Raises:
        UsageError: the form is unknown
    """

    paper = "Chai 2020"
    architectures = {"highway_6l": ("post", (6, 6), {})}
    options = {"form": Option("gate on x (gate) or on F(x) (attention)", FORMS)}

    def __init__(self, stack: Stack, number: int, form: str = "gate"):
        super().__init__(stack, number)
        self.gates_input = form == "gate"
        self.linears = gate_linears(stack.dim, self.sublayers)

    def matrices(self) -> dict[str, Tensor]:
        return gate_matrices(self.linears)

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        r = x + output
        if self.linears:
            gate, value = self.linears[sublayer](x).chunk(2, dim=-1)
            r = r + torch.sigmoid(gate) * (value - (x if self.gates_input else output))
        return r.to(x.dtype)
