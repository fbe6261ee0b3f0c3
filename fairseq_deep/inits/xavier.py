"""fairseq's own start, and the papers' baseline: Xavier matrices and zero biases.

Understanding the difficulty of training deep feedforward neural networks, Glorot and Bengio, 2010:

    W ~ U(-gamma, gamma),  gamma = sqrt(6 / (fan_in + fan_out))      Eq. (9) of Zhang et al., 2019

Queries, keys and values of a self-attention were one fused matrix (C x 3C) in the papers' code, so that their gamma is
sqrt(6 / 4C), which is Xavier with gain 1/sqrt(2) for each. Embeddings: N(0, 1/C).

fairseq 0.10 and later start differently: biases of queries, keys, values and of the feed-forward sub-layer are not
zero, its matrices are smaller (U(+-1/sqrt(fan_in))), and cross-attention has the gain of self-attention.
"""

from torch import Tensor, nn

from .base import INITS, Init, Place


@INITS.register("fairseq")
class Fairseq(Init):
    """Leave everything as fairseq starts it."""

    touches = False
    without_residual = True


@INITS.register("xavier")
class Xavier(Init):
    """Xavier matrices, zero biases."""

    without_residual = True

    def matrix(self, weight: Tensor, place: Place) -> None:
        nn.init.xavier_uniform_(weight, gain=self.gain(place))

    def gain(self, place: Place) -> float:
        """Factor on gamma for the matrix at *place*."""
        fused = place.part == "self_attn" and place.role in ("q_proj", "k_proj", "v_proj")
        return 0.5**0.5 if fused else 1.0
