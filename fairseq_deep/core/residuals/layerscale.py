"""LayerScale: each feature of a sub-layer's output has a learned factor with a small initial value.

Going deeper with Image Transformers, Touvron et al., ICCV 2021:

    x_{l+1} = x_l + lambda * F(LN(x_l))

with a vector lambda for each sub-layer, which starts at 0.1 in stacks of up to 18 layers, 1e-5 up to 24, 1e-6 in deeper
ones. Encoder and decoder each use their own depth. The paper is about vision and pre-norm; we also support post-norm
stacks.

Names here: ``weight[sublayer]`` is lambda.
"""

import torch
from torch import Tensor, nn

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection


def default_start(layers: int) -> float:
    """Return the initial lambda in a stack with a number of *layers*."""
    if layers <= 18:
        return 0.1
    return 1e-5 if layers <= 24 else 1e-6


@RESIDUALS.register("layerscale")
class LayerScale(KeepFp32, ResidualConnection):
    """r = x + lambda * F.

    Args:
        stack, number: see :class:`ResidualConnection`
        start: initial lambda; None: by the depth of the stack

    Shapes:
        weight: sub-layers x C, always in fp32: fp16 has no normal number below 6e-5

    Raises:
        UsageError: the start is not a positive number
    """

    paper = "Touvron 2021"
    architectures = {"layerscale_18l18l": ("pre", (18, 18), {})}
    foldable = True
    options = {"start": Option("initial factors (default: by the depth, 0.1, 1e-5 or 1e-6)", Range(0, above=True))}

    def __init__(self, stack: Stack, number: int, start: float | None = None):
        super().__init__(stack, number)
        start = default_start(stack.layers) if start is None else start
        self.weight = nn.Parameter(torch.full((self.sublayers, stack.dim), float(start)))

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        return 1.0, self.weight[sublayer]

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return (x + self.weight[sublayer] * output).to(x.dtype)
