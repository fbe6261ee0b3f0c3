"""``--fast-dropout``: dropout in a third of the time on a CPU.

torch draws a number for each entry, which takes longer than many matrix products. Sixteen random bits an entry will do:
four of them come from one number. The probability is exact to 2^-17, and what is kept is scaled by the one that is
drawn with, so that the mean stays. The same seed gives the same masks, but others than without the flag.
"""

import functools

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from .compat import is_compiling


@torch.jit.unused
def fast_dropout(x: Tensor, probability: float) -> Tensor:
    """*x* with each entry set to zero with *probability* (0 to 1), and scaled so that its mean stays."""
    dropped = round(probability * 2**16)
    if dropped == 0 or dropped == 2**16 or x.device.type != "cpu":
        return F.dropout(x, probability)
    numbers = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    bits = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    kept = torch.ge(bits, dropped - 2**15, out=torch.empty(x.shape, dtype=x.dtype))
    return x * kept.mul_(2**16 / (2**16 - dropped))


def dropout_of(part: nn.Module, probability: float) -> nn.Module:
    """The dropout of a *part* that is no layer of fairseq's: ``--retain-dropout`` keeps it, too, while translating."""
    return FairseqDropout(probability, module_name=type(part).__name__)


def _forward(module: nn.Module, x: Tensor, inplace: bool = False) -> Tensor:
    """Stands for the call of *module*, a dropout."""
    if not (module.training or getattr(module, "apply_during_inference", False)):
        return x
    return F.dropout(x, module.p) if is_compiling() else fast_dropout(x, module.p)


def speed_up_dropout(model: nn.Module) -> None:
    """Let all parts of *model* that drop entries do so with :func:`fast_dropout`."""
    for part in model.modules():
        if isinstance(part, (FairseqDropout, nn.Dropout)):
            part.forward = functools.partial(_forward, part)
        elif hasattr(part, "fast_dropout"):
            part.fast_dropout = True
