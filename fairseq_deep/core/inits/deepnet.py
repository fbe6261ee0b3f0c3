"""DeepNet: post-norm with a scaled residual connection.

DeepNet: Scaling Transformers to 1,000 Layers, Wang et al., 2022. For N encoder and M decoder layers:

    x_{l+1} = LN(alpha x_l + F(x_l))
    encoder   alpha = 0.81 (N^4 M)^(1/16)    beta = 0.87 (N^4 M)^(-1/16)
    decoder   alpha = (3M)^(1/4)             beta = (12M)^(-1/4)

Feed-forward matrices, and values and outputs of attentions are Xavier (normal) with gain beta, queries and keys with
gain 1.
"""

from torch import Tensor, nn

from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base import INITS, Init, MatrixLocation


class ScaledConnection(ResidualConnection):
    """r = alpha x + F(x)."""

    weighs_stream = True

    def __init__(self, stack: Stack, number: int, alpha: float):
        super().__init__(stack, number)
        self.alpha = alpha

    def stream_weight(self, sublayer: int) -> float:
        return self.alpha

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return self.alpha * x + output


@INITS.register("deepnet")
class DeepNet(Init):
    """DeepNet, with the constants alpha and beta of one stack.

    Attributes:
        alpha: factor on the residual connection
        beta: gain of the scaled matrices
    """

    paper = "Wang 2022"
    norms = ("post",)
    connects = True
    folds_stream = True
    three_sublayers = True
    counts_layers = True

    def __init__(self, stack: Stack):
        super().__init__(stack)
        n, m = stack.encoder_layers, stack.decoder_layers
        if stack.side == "encoder":
            self.alpha, self.beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        else:
            self.alpha, self.beta = (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)

    def connection(self, number: int) -> ResidualConnection:
        return ScaledConnection(self.stack, number, self.alpha)

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        nn.init.xavier_normal_(weight, gain=1.0 if place.role in ("q_proj", "k_proj", "gate") else self.beta)
