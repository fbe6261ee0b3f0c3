"""ProRes: the branches of a layer grow to their full size in the first updates, more slowly in higher layers.

Progressive Residual Warmup for Language Model Pretraining, Chen et al., 2026 (arXiv 2603.05369). In layer l, from 1 in
its stack, and in update t:

    pre-norm   x_{l+1} = x_l + a_l(t) F(LN(x_l))
    post-norm  x_{l+1} = LN(x_l + a_l(t) F(x_l)),    a_l(t) = min(1, t / (T l))

A stack of L layers is the plain one from update T L on. This is the linear schedule, the default of the authors' code.
There the first update has t = 0; we start with t = 1 to give every matrix a gradient. T is 1,000, as in the paper's
runs of 24 layers and 100,000 updates; short runs need less.

Names here: ``scale`` is a_l(t), ``period`` is T.
"""

from typing import Any

from torch import Tensor

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.stack import MethodConfig, Stack

from .base import RESIDUALS
from .branchnorm import GrowingBranch

INNER = ("plain", "completep", "layernorm-scaling")


@RESIDUALS.register("prores")
class ProRes(GrowingBranch):
    """r = x + a_l(t) F, or the connection *around* applied to x and a_l(t) F.

    Args:
        stack, number: see :class:`ResidualConnection`
        period: T
        around: the connection of the scaled branch: "plain", "completep" or "layernorm-scaling"
        inner: this connection with its options

    Raises:
        UsageError: T is less than 1, or the connection is unknown
    """

    paper = "Chen 2026"
    architectures = {"prores_18l18l": ("pre", (18, 18), {})}
    counts_layers = True
    options = {
        "period": Option("layer l has its full size after N l updates", Range(1)),
        "around": Option("connection of the scaled branches", INNER),
    }

    def __init__(
        self,
        stack: Stack,
        number: int,
        period: int = 1000,
        around: str = "plain",
        inner: MethodConfig | None = None,
    ):
        super().__init__(stack, number, period * number)
        if inner is None:
            around = self.inner_method({"around": around})
            inner = MethodConfig(around, RESIDUALS.get(around))
        self.inner = inner.build(stack, number)

    @classmethod
    def inner_method(cls, options: dict[str, Any]) -> str:
        return options.get("around", "plain")

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        before, after = self.inner.factors(sublayer)
        return before, after * super().factors(sublayer)[1]

    def adam_factors(self) -> tuple[float, float]:
        return self.inner.adam_factors()

    def scale_input(self, x: Tensor) -> Tensor:
        return self.inner.scale_input(x)

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return self.inner(x, self.scale * output, sublayer, bottom).to(x.dtype)
