"""The papers' baseline: Xavier matrices and zero biases.

Understanding the difficulty of training deep feedforward neural networks, Glorot and Bengio, 2010:

    W ~ U(-gamma, gamma),  gamma = sqrt(6 / (fan_in + fan_out))      Eq. (9) of Zhang et al., 2019

Queries, keys and values of a self-attention were one fused matrix (C x 3C) in the papers' code. Their gamma is
therefore sqrt(6 / 4C), which is Xavier with gain 1/sqrt(2) for each. Embeddings: N(0, 1/C).
"""

from torch import Tensor, nn

from .base import INITS, Init, MatrixLocation


@INITS.register("xavier")
class Xavier(Init):
    """Xavier matrices, zero biases."""

    paper = "Glorot 2010"
    without_residual = True

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        nn.init.xavier_uniform_(weight, gain=self.gain(place))

    def gain(self, place: MatrixLocation) -> float:
        """Return the factor on gamma for the matrix at *place*."""
        fused = place.part == "self_attn" and place.role in ("q_proj", "k_proj", "v_proj")
        return 0.5**0.5 if fused else 1.0
