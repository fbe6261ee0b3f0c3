"""Mix-LN: the lowest layers of a stack are post-norm, the layers above them pre-norm.

Mix-LN: Unleashing the Power of Deeper Layers by Combining Pre-LN and Post-LN, Li et al., 2024 (arXiv 2412.13795). With
p post-norm layers in a stack of L:

    x_{l+1} = LN(x_l + F(x_l))    for l <= p
    x_{l+1} = x_l + F(LN(x_l))    for l > p

and a norm after the stack, as in pre-norm. The authors' code has p = 3 of 12 layers and 6 of 24. Here p is L / 4,
rounded down, and at least 1. The paper is about language models.

Names here: ``layers`` is p.
"""

from typing import Any

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS
from .plain import Plain


@RESIDUALS.register("mix-ln")
class MixLN(Plain):
    """r = x + F, in post-norm or pre-norm, depending on the number of the layer.

    Args:
        stack, number: see :class:`ResidualConnection`
        layers: p; None: a quarter of the stack's layers

    Raises:
        UsageError: p is less than 1, or exceeds the number of layers
    """

    paper = "Li 2024"
    architectures = {"mix_ln_18l18l": ("pre", (18, 18), {})}
    norms = ("pre",)
    counts_layers = True
    foldable = False
    options = {"layers": Option("number of post-norm layers (default: a quarter of the stack)", Range(1))}

    def __init__(self, stack: Stack, number: int, layers: int | None = None):
        super().__init__(stack, number)
        self.pre_norm = number > (max(1, stack.layers // 4) if layers is None else layers)

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        layers = options.get("layers")
        if layers is not None and layers > stack.layers:
            raise UsageError(
                f"--mix-ln-layers {layers} exceeds the {stack.layers} layers of the {stack.side}: use fewer, "
                f"or add --{stack.side}-residual plain"
            )
