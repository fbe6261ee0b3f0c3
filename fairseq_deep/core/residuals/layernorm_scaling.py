"""LayerNorm Scaling: the normalised input of a sub-layer decreases with the number of its layer.

The Curse of Depth in Large Language Models, Sun et al., 2025 (arXiv 2502.05795). In layer l, from 1 in its stack:

    x_{l+1} = x_l + F(LN(x_l) / sqrt(l))

for every sub-layer; the norm after the stack is not scaled. The paper is about language models. Attention to the source
only normalises its query, therefore its keys and values are not scaled (our derivation).

Names here: ``scale`` is 1 / sqrt(l).
"""

from torch import Tensor

from fairseq_deep.core.stack import Stack

from .base import RESIDUALS
from .plain import Plain


@RESIDUALS.register("layernorm-scaling")
class LayerNormScaling(Plain):
    """r = x + F, where F reads LN(x) / sqrt(l)."""

    paper = "Sun 2025"
    architectures = {"layernorm_scaling_18l18l": ("pre", (18, 18), {})}
    norms = ("pre",)
    counts_layers = True
    shrinks_layers = True

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.scale = number**-0.5

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        return self.scale, 1.0

    def scale_input(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale
