"""T-Fixup and ReZero: deep stacks without layer norm.

Improving Transformer Optimization Through Better Initialization (T-Fixup), Huang et al., ICML 2020. From Xavier:

    encoder   values, outputs, feed-forward  x 0.67 N^(-1/4)
    decoder   the same, in both attentions   x (9M)^(-1/4)
    embedding                                x (9N)^(-1/4), a separate one of the decoder (9M)^(-1/4)

ReZero is All You Need, Bachlechner et al., 2020: x_{l+1} = x_l + a F(x_l), a = 0 at the start and learned, one for the
sub-layers of a layer.
"""

from torch import Tensor, nn

from .base import INITS, Connection, Place
from .xavier import Xavier


@INITS.register("tfixup")
class TFixup(Xavier):
    """T-Fixup; trains without warm-up."""

    norms = ("none",)
    without_residual = False
    three_sublayers = True

    def connection(self) -> Connection:
        return Connection(layer_norm=False)

    def gain(self, place: Place) -> float:
        if place.role in ("q_proj", "k_proj"):
            return 0.5**0.5  # as of fairseq's start, in both attentions
        if place.role == "gate":
            return 1.0
        return 0.67 * self.encoder_layers**-0.25 if self.side == "encoder" else (9 * self.decoder_layers) ** -0.25

    def embedding(self, weight: Tensor) -> None:
        layers = self.encoder_layers if self.side == "encoder" else self.decoder_layers
        nn.init.normal_(weight, std=weight.size(1) ** -0.5 * (9 * layers) ** -0.25)


@INITS.register("rezero")
class ReZero(Xavier):
    """ReZero: Xavier matrices behind a gate that starts closed."""

    norms = ("none",)
    without_residual = False

    def connection(self) -> Connection:
        return Connection("gate", 0.0, layer_norm=False)
