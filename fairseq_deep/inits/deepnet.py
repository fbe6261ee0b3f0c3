"""DeepNet: post-norm with a scaled residual connection.

DeepNet: Scaling Transformers to 1,000 Layers, Wang et al., 2022. For N encoder and M decoder layers:

    x_{l+1} = LN(alpha x_l + F(x_l))
    encoder   alpha = 0.81 (N^4 M)^(1/16)    beta = 0.87 (N^4 M)^(-1/16)
    decoder   alpha = (3M)^(1/4)             beta = (12M)^(-1/4)

Feed-forward matrices, values and outputs of attentions start as Xavier (normal) with gain beta, queries and keys with
gain 1.
"""

from torch import Tensor, nn

from .base import INITS, Connection, Init, Place


@INITS.register("deepnet")
class DeepNet(Init):
    """The constants alpha and beta of one stack.

    Attributes:
        alpha: factor on the residual connection
        beta: gain of the scaled matrices
    """

    norms = ("post",)
    three_sublayers = True
    counts_layers = True

    def __init__(self, side: str, encoder_layers: int, decoder_layers: int, decoder_sublayers: int = 3):
        super().__init__(side, encoder_layers, decoder_layers, decoder_sublayers)
        if side == "encoder":
            depth = encoder_layers**4 * decoder_layers
            self.alpha, self.beta = 0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)
        else:
            self.alpha, self.beta = (3 * decoder_layers) ** (1 / 4), (12 * decoder_layers) ** (-1 / 4)

    def connection(self) -> Connection:
        return Connection("constant", self.alpha)

    def matrix(self, weight: Tensor, place: Place) -> None:
        nn.init.xavier_normal_(weight, gain=1.0 if place.role in ("q_proj", "k_proj", "gate") else self.beta)
