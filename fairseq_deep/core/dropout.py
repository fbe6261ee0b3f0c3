"""Dropout that can stay active in evaluation, and ``--fast-dropout``, which takes a third of its time on a CPU.

torch draws a number for each entry, which takes longer than many matrix products. Sixteen random bits per entry are
enough, and one number provides bits for four entries. The probability is exact to 2^-17. Kept entries are scaled by the
rounded probability, which preserves the mean. The same seed gives the same masks, but not the masks without the flag.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compat import is_compiling


class Dropout(nn.Module):
    """Dropout of single entries.

    Args:
        p: probability of setting an entry to zero
        module_name: its name for fairseq's ``--retain-dropout-modules``

    Attributes:
        apply_during_inference: also drop entries in evaluation
        fast: draw masks with :func:`fast_dropout`
    """

    def __init__(self, p: float, module_name: str = ""):
        super().__init__()
        self.p, self.module_name = p, module_name
        self.apply_during_inference = self.fast = False

    @property
    def active(self) -> float:
        """The probability that applies now."""
        return self.p if self.training or self.apply_during_inference else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* with entries dropped in training, or *x* itself."""
        if self.active == 0:
            return x
        return fast_dropout(x, self.p) if self.fast else F.dropout(x, self.p)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: Sequence[str] | None = None, **_
    ) -> None:
        """Apply fairseq's ``--retain-dropout`` and ``--retain-dropout-modules``; called by fairseq."""
        named = retain_dropout_modules is None or self.module_name in retain_dropout_modules
        self.apply_during_inference = retain_dropout and named

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropout_of(part: nn.Module, probability: float) -> Dropout:
    """Build a dropout of *part*, named after its class."""
    return Dropout(probability, type(part).__name__)


def fast_dropout(x: Tensor, probability: float) -> Tensor:
    """Set each entry of *x* to zero with *probability* (0 to 1), and scale the rest to preserve the mean."""
    dropped = round(probability * 2**16)
    if dropped == 0 or dropped == 2**16 or x.device.type != "cpu" or is_compiling():
        return F.dropout(x, probability)
    numbers = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    bits = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    kept = torch.ge(bits, dropped - 2**15, out=torch.empty(x.shape, dtype=x.dtype))
    return x * kept.mul_(2**16 / (2**16 - dropped))


def speed_up_dropout(model: nn.Module) -> None:
    """Use :func:`fast_dropout` in all dropouts of *model*."""
    for part in model.modules():
        if isinstance(part, Dropout):
            part.fast = True
