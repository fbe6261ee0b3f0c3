"""Lipschitz-constrained initialisation.

Lipschitz Constrained Parameter Initialization for Deep Transformers, Xu et al., ACL 2020, Section 3.2: if sub-layers
initially have a Lipschitz constant of at most 1, the residual path of a deep post-norm stack is preserved.

    linear      W ~ U(-l, l),  l = sqrt(1 / fan_in)
    embedding   E ~ U(-e, e),  e = sqrt(2 / (C + V))

for all layers alike, biases 0. It only constrains the initial values. The paper's two computation orders are norm
placements: v1 is post-norm, v2 is pre-norm. In the authors' code, but not in the paper, v1 also normalises the
embeddings (``--layernorm-embedding``).
"""

import math

from torch import Tensor, nn

from fairseq_deep.core.fields import Option
from fairseq_deep.core.stack import Stack

from .base import INITS, Init, MatrixLocation

EMBEDDINGS = ("lipschitz", "normal")


@INITS.register("lipschitz")
class Lipschitz(Init):
    """Matrices within +-sqrt(1/fan_in), also in aggregators; embeddings within +-sqrt(2/(C + V)).

    Args:
        stack: see :class:`Init`
        embeddings: "lipschitz", as above, or "normal": N(0, 1/C), like all other methods. sqrt(2/(C + V)) makes them
            small: with V = 32,000 and C = 512, scaled by sqrt(C), they have a standard deviation of 0.10, whereas
            sinusoidal positions have 0.71. With small batches, a deep model then ignores its source
            (docs/results/post-norm.md).

    Raises:
        UsageError: *embeddings* is unknown
    """

    paper = "Xu 2020"
    without_residual = True
    options = {"embeddings": Option("embeddings, normal is N(0, 1/width)", EMBEDDINGS)}

    def __init__(self, stack: Stack, embeddings: str = "lipschitz"):
        super().__init__(stack)
        self.embeddings = embeddings

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        _fill(weight)

    def embedding(self, weight: Tensor) -> None:
        if self.embeddings == "normal":
            super().embedding(weight)
            return
        _fill_table(weight)

    def relative_keys(self, weight: Tensor) -> None:
        _fill_table(weight)

    def output(self, weight: Tensor) -> None:
        _fill(weight)

    def aggregator_matrix(self, weight: Tensor) -> None:
        _fill(weight)


def _fill(weight: Tensor) -> None:
    bound = math.sqrt(1.0 / max(weight.size(1), 1))  # a feed-forward sub-layer may have a width of 0
    nn.init.uniform_(weight, -bound, bound)


def _fill_table(weight: Tensor) -> None:
    bound = math.sqrt(2.0 / sum(weight.shape))
    nn.init.uniform_(weight, -bound, bound)
