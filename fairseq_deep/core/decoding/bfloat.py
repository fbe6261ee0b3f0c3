"""Linear layers in bf16 for decoding on a CPU.

    y = bf16(x) bf16(W)^T + bf16(b),    accumulated in fp32, rounded to bf16
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .timing import least_times

SLOW = 2  # times the time of fp32: if slower, the processor lacks these products, and torch emulates them


def in_blocks(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the product with *weight* in oneDNN's format.

    Raises:
        AttributeError, RuntimeError: this torch or this machine does not support it
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _product(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the product with *weight*, in oneDNN's format if this torch and this machine support it."""
    try:
        product = in_blocks(weight)
        product(weight[:1] * 0, None)
    except (AttributeError, RuntimeError):
        return lambda x, bias: F.linear(x, weight, bias)
    return product


class BfloatLinear(nn.Module):
    """Linear layer with a product in bf16; input and output types do not change."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.linear.load_state_dict(linear.state_dict())
        self.linear.to(torch.bfloat16)
        self._product = _product(self.linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """The weight in fp32, which fairseq's own attention reads outside incremental decoding."""
        return self.linear.weight.float()

    @property
    def bias(self) -> Tensor | None:
        return None if self.linear.bias is None else self.linear.bias.float()

    def __getstate__(self):
        return {**self.__dict__, "_product": None}  # can be neither copied nor pickled

    def __setstate__(self, state):
        super().__setstate__(state)
        self._product = _product(self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16)
        y = self.linear(rows) if torch.is_grad_enabled() else self._product(rows, self.linear.bias)
        return y.to(x.dtype)


@functools.cache
def has_bfloat() -> bool:
    """Return whether products in bf16 are fast enough on this machine."""
    linear, x = nn.Linear(512, 512), torch.ones(128, 512)
    with torch.no_grad():
        try:
            ways = {"fp32": functools.partial(F.linear, weight=linear.weight), "bf16": BfloatLinear(linear)}
            times = least_times(ways, x, rounds=3)
        except RuntimeError:
            return False
    return times["bf16"] < SLOW * times["fp32"]
