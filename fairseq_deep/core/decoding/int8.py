"""Linear layers in int8 for decoding on a CPU.

    y = s_x s_w (x_q W_q^T) + b,    x_q = round(x / s_x),    W_q = round(W / s_w)

Each row of W has a scale s_w, and each row of x a scale s_x: its largest absolute value divided by the number of steps,
127. An output therefore depends only on its own row of x, not on the batch, and a row that is not finite does not
affect other rows. The sums are exact integers: all implementations give the same y, up to the last bits of fp32.

Compiled kernels (``native/products.h``) compute the products; without them, FBGEMM in torch does. Without VNNI, FBGEMM
adds pairs of products in 16 bits, which can overflow, and then silently gives wrong sums. It is therefore tested with
the largest numbers before it is used; if they overflow, x has 63 steps.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_deep.core.native import load
from fairseq_deep.core.native.packed import WEIGHT_STEPS, NativeLinear, quantise

NATIVE, FBGEMM = "compiled kernels", "FBGEMM"
INPUT_STEPS = (127, 63)  # in order: the second if the first overflows

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps x (R x K), its row maxima (R x 1) and a buffer like x to y without bias, divided by the maxima, R x N."""


def by_fbgemm(weight: Tensor, scales: Tensor, steps: int) -> Product:
    """Build FBGEMM's product, which rounds x while packing it. Its x_q are unsigned, with an offset.

    Raises:
        AttributeError, RuntimeError: this torch or this machine does not support it
    """
    operation = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():  # torch's quantised tensors are deprecated
        warnings.simplefilter("ignore")
        zeros = torch.zeros(len(weight), dtype=torch.long)
        rows = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
        try:
            torch.backends.quantized.engine = "fbgemm"
            packed = torch.ops.quantized.linear_prepack(rows, None)
        finally:
            torch.backends.quantized.engine = engine
    return lambda x, largest, room: operation(torch.div(x, largest, out=room), 1.0 / steps, steps + 1, packed)


def _extremes(rows: int, inputs: int, steps: int) -> Tensor:
    """Return a matrix of integers within *steps*; half of the rows give the largest possible sums."""
    whole = torch.arange(rows * inputs).mul(7919).remainder(2 * steps + 1).sub(steps).view(rows, inputs)
    whole[0::4], whole[2::4] = steps, -steps
    whole[:, :1] = steps
    return whole


@torch.no_grad()
def _is_right(steps: int, size: int = 256) -> bool:
    """Return whether this torch has FBGEMM's product, with correct sums of *size* products."""
    weight = _extremes(size, size, WEIGHT_STEPS)
    try:
        product = by_fbgemm(weight.to(torch.int8), torch.ones(size), steps)
        for rows in (1, 8, 128):
            x = _extremes(rows, size, steps)
            sums = (x.double() @ weight.double().t()) / steps
            y = product(x.float() / steps, torch.ones(rows, 1), torch.empty(rows, size)).double()
            if float((y - sums).abs().max()) > 1e-6 * size * WEIGHT_STEPS:
                return False
    except (AttributeError, RuntimeError):
        return False
    return True


@functools.cache
def fbgemm_steps() -> int | None:
    """Return the number of steps of x with which FBGEMM's sums do not overflow here; None if torch lacks FBGEMM."""
    return next((steps for steps in INPUT_STEPS if _is_right(steps)), None)


def available_kernels() -> tuple[str, int] | None:
    """Return the name of the products, `NATIVE` or `FBGEMM`, and the number of steps of x; None if there are none."""
    if load() is not None:
        return NATIVE, WEIGHT_STEPS
    steps = fbgemm_steps()
    return None if steps is None else (FBGEMM, steps)


class Int8Linear(nn.Module):
    """Linear layer with a product in int8; input and output are in fp32, without gradients.

    Args:
        linear: the layer, on a CPU

    Raises:
        RuntimeError: torch does not have the product for this machine (see :func:`available_kernels`)
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        if available_kernels() is None:
            raise RuntimeError("this torch does not have int8 products for this machine: use fp32 or bf16")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.whole, self.scales = quantise(linear.weight.detach().float())
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach().float()
        self._prepare()

    def _prepare(self) -> None:
        name, steps = available_kernels()
        self.native = NativeLinear(self.whole, self.scales) if name == NATIVE else None
        if self.native is None:
            self.product = by_fbgemm(self.whole, self.scales, steps)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("product", "native")}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._prepare()

    @property
    def weight(self) -> Tensor:
        """The weight in fp32, which fairseq's own attention reads outside incremental decoding."""
        return self.whole * self.scales.unsqueeze(1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.requires_grad or rows.dtype != torch.float32 or not rows.is_contiguous():
            rows = rows.detach().float().contiguous()
        if self.native is not None:
            y = self.native(rows, self.bias).view(*x.shape[:-1], self.out_features)
            return y if y.dtype == x.dtype else y.to(x.dtype)
        sizes = rows.abs()
        largest = sizes.amax(1, keepdim=True)
        y = self.product(rows, largest, sizes)
        y = y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest, out=y)
        y = y.view(x.shape[:-1] + y.shape[1:])
        return y if y.dtype == x.dtype else y.to(x.dtype)
