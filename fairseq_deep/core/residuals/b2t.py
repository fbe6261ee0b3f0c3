"""B2T connection: from the bottom of a layer to its top, around all norms but the last.

B2T Connection: Serving Stability and Performance in Deep Transformers, Takase et al., Findings of ACL 2023 (first as
On Layer Normalizations and Residual Connections in Transformers, 2022). In a post-norm layer with the input x:

    r = x_s + F_s(x_s)             for each sub-layer s but the last
    r = x_s + F_s(x_s) + x         for the last one, before its norm

The authors' code also scales all initial weights by the depth^(-1/2); that is an initialisation, see
``docs/methods/residual.md``.
"""

from torch import Tensor

from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection


@RESIDUALS.register("b2t")
class BottomToTop(ResidualConnection):
    """r = x + F, plus the layer's input in its last sub-layer."""

    paper = "Takase 2022"
    norms = ("post",)

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.last = self.sublayers - 1

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        r = x + output
        if sublayer == self.last:
            r = r + bottom
        return r.to(x.dtype)
