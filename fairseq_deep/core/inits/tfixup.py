"""T-Fixup: deep stacks without layer norm, which train without warm-up.

Improving Transformer Optimization Through Better Initialization, Huang et al., ICML 2020. Starting from Xavier:

    encoder   values, outputs, feed-forward  x 0.67 N^(-1/4)
    decoder   the same, in both attentions   x (9M)^(-1/4)
    embedding                                x (9N)^(-1/4), a separate one of the decoder (9M)^(-1/4)
"""

from torch import Tensor, nn

from .base import INITS, MatrixLocation
from .xavier import Xavier


@INITS.register("tfixup")
class TFixup(Xavier):
    """T-Fixup."""

    paper = "Huang 2020"
    norms = ("post",)
    layer_norm = False
    without_residual = False
    three_sublayers = True

    def gain(self, place: MatrixLocation) -> float:
        if place.role in ("q_proj", "k_proj"):
            return 0.5**0.5  # fairseq's gain, in both attentions
        if place.role == "gate":
            return 1.0
        return 0.67 * self.stack.layers**-0.25 if self.stack.side == "encoder" else (9 * self.stack.layers) ** -0.25

    def embedding(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=weight.size(1) ** -0.5 * (9 * self.stack.layers) ** -0.25)
