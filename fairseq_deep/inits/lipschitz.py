"""Lipschitz-constrained initialisation.

Lipschitz Constrained Parameter Initialization for Deep Transformers, Xu et al., ACL 2020, Section 3: sub-layers that
start as functions with a Lipschitz constant of at most 1 keep the residual path alive in a deep post-norm stack.

    linear      W ~ U(-l, l),  l = sqrt(1 / fan_in)
    embedding   E ~ U(-e, e),  e = sqrt(2 / (C + V))

for all layers alike, biases 0. It constrains the start only. The paper's two computation orders are norm placements: v1
is post-norm with a norm on the embedding (``--layernorm-embedding``), v2 is pre-norm.
"""

import math

from torch import Tensor, nn

from .base import INITS, Init, Place


@INITS.register("lipschitz")
class Lipschitz(Init):
    """Matrices within +-sqrt(1/fan_in), embeddings within +-sqrt(2/(C + V)); those of an aggregator too."""

    paper = "Xu 2020"
    without_residual = True

    def matrix(self, weight: Tensor, place: Place) -> None:
        _fill(weight)

    def embedding(self, weight: Tensor) -> None:
        bound = math.sqrt(2.0 / sum(weight.shape))
        nn.init.uniform_(weight, -bound, bound)

    def relative_keys(self, weight: Tensor) -> None:
        self.embedding(weight)

    def output(self, weight: Tensor) -> None:
        _fill(weight)

    def aggregator_matrix(self, weight: Tensor) -> None:
        _fill(weight)


def _fill(weight: Tensor) -> None:
    bound = math.sqrt(1.0 / weight.size(1))
    nn.init.uniform_(weight, -bound, bound)
