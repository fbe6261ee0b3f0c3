"""BranchNorm: the branch of a post-norm sub-layer grows to its full size in the first updates.

BranchNorm: Robustly Scaling Extremely Deep Transformers, Liu et al., 2023:

    x_{l+1} = LN(x_l + a_t F(x_l)),    a_t = min(1, t / T)

in update t, counted from 1: training starts with almost closed branches, and from update T on the stack is a plain
post-norm stack. We choose T = 4000, a usual number of warm-up updates.

Names here: ``scale`` is a_t, ``updates`` is T.
"""


import torch
from torch import Tensor

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .base import RESIDUALS, ResidualConnection


class GrowingBranch(KeepFp32, ResidualConnection):
    """r = x + a_t F, with a_t = min(1, t / updates) in update t, counted from 1.

    a_t is saved with the weights: an interrupted run resumes with it, and a model generates with the a_t of its
    weights. It never decreases: further training of a trained model keeps it, even if the new run counts from 1.

    Args:
        stack, number: see :class:`ResidualConnection`
        updates: first update in which the branch has its full size

    Shapes:
        scale: a_t, a number, in fp32
    """

    foldable = True

    def __init__(self, stack: Stack, number: int, updates: int):
        super().__init__(stack, number)
        self.updates = updates
        self.place = f"layer {number} of the {stack.side}"
        self.register_buffer("scale", torch.tensor(1.0 / updates))

    def set_num_updates(self, num_updates: int) -> None:
        """Set a_t for the update after *num_updates*; fairseq calls it before each update."""
        self.scale.clamp_(min=min(1.0, (num_updates + 1) / self.updates))

    def fp32_tensors(self) -> list[Tensor]:
        return [self.scale]  # bf16 cannot represent its increments

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        share = float(self.scale)
        if share < 1.0:
            raise UsageError(
                f"branches that still grow ({self.place} is at {share:.3g} of its size): "
                f"use a checkpoint of update {self.updates} or later"
            )
        return 1.0, share

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return (x + self.scale * output).to(x.dtype)


@RESIDUALS.register("branchnorm")
class BranchNorm(GrowingBranch):
    """r = x + a_t F, with the same a_t in all layers.

    Args:
        stack, number: see :class:`ResidualConnection`
        updates: T

    Raises:
        UsageError: T is less than 1
    """

    paper = "Liu 2023"
    architectures = {"branchnorm_18l18l": ("post", (18, 18), {})}
    norms = ("post",)
    options = {"updates": Option("updates until the branches have their full size", Range(1))}

    def __init__(self, stack: Stack, number: int, updates: int = 4000):
        super().__init__(stack, number, updates)
