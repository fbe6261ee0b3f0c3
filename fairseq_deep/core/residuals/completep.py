"""CompleteP: every branch has a factor that decreases with the depth of its stack.

Don't be lazy: CompleteP enables compute-efficient deep transformers, Dey et al., 2025 (arXiv 2505.01618), Table 1:

    x_{l+1} = x_l + m_L^-a F(LN(x_l)),    m_L = L / L_base,    a = 1

Settings tuned at the depth L_base then transfer to the depth L; a = 1/2 is depth-muP (arXiv 2310.02244). The paper has
one stack. Here L is the depth of the encoder or of the decoder, each with its own base: the number of branches per
layer cancels in the ratio (our derivation). Adam's settings for the parameters of layers also depend on the depth. The
optimizer applies them (*rates*; supported by ``--optimizer fused_adam`` and ``muon``):

    learning rate  eta m_L^(a-1)
    eps            eps m_L^-a

The rest of Table 1 scales the width, which we do not implement.

Names here: ``factor`` is m_L^-a, ``base`` is L_base, ``alpha`` is a.
"""

import logging

import torch
from torch import Tensor

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS
from .plain import Plain

logger = logging.getLogger(__name__)


@RESIDUALS.register("completep")
class CompleteP(Plain):
    """r = x + m_L^-a F, without parameters.

    Args:
        stack, number: see :class:`ResidualConnection`
        base: L_base; in a stack of this depth, the connection is plain
        alpha: a, from 0 (plain) to 1
        rates: also scale learning rates and eps

    Raises:
        UsageError: a value is out of range
    """

    paper = "Dey 2025"
    architectures = {"completep_18l18l": ("pre", (18, 18), {})}
    norms = ("pre",)
    counts_layers = True
    running_sum = True
    options = {
        "base": Option("depth at which the branches of a stack have their full size", Range(0, above=True), True),
        "alpha": Option("exponent of the depth", Range(0, 1), True),
        "rates": Option("also scale Adam's learning rate and eps of the layers (fused_adam, muon)"),
    }

    def __init__(self, stack: Stack, number: int, base: float = 1.0, alpha: float = 1.0, rates: bool = False):
        super().__init__(stack, number)
        ratio = stack.layers / base
        self.factor = ratio**-alpha
        self.factors_of_adam = (ratio ** (alpha - 1.0), ratio**-alpha) if rates else (1.0, 1.0)
        if number == 1:
            self._log(stack, base, alpha, rates)

    def _log(self, stack: Stack, base: float, alpha: float, rates: bool) -> None:
        depth = f"{stack.side}: --residual completep, base {base:g}"
        if base > stack.layers:
            logger.info(f"{depth} is deeper than the {stack.layers} layers: branches have the factor {self.factor:.4g}")
        if alpha < 1.0 and not rates:
            logger.info(f"{depth}, alpha {alpha:g} only scales branches: add --completep-rates for learning rates")

    def adam_factors(self) -> tuple[float, float]:
        return self.factors_of_adam

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        return 1.0, self.factor

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        if self.factor == 1.0:
            return super().forward(x, output, sublayer, bottom)
        return torch.add(x, output, alpha=self.factor).to(x.dtype)
