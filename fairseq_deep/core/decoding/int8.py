"""Linear layers in int8 for decoding on a CPU.

    y = s_x s_w (x_q W_q^T) + b,    x_q = round(x / s_x),    W_q = round(W / s_w)

Each row of W has a scale s_w, and each row of x a scale s_x: its largest absolute value divided by the number of steps,
127. An output therefore depends only on its own row of x, not on the batch, and a row that is not finite does not
affect other rows. The sums are exact integers: all implementations give the same y, up to the last bits of fp32.

Compiled kernels (``native/products.h``) compute the products; without them, torch does. Without VNNI, the processor
adds pairs of products in 16 bits, which can overflow, and some of torch's implementations then silently give wrong
sums. Each is therefore tested with the largest numbers before it is used; if all of them overflow, x has 63 steps.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.native import load
from fairseq_deep.core.native.packed import WEIGHT_STEPS, NativeLinear, quantise

from .timing import least_times

INPUT_STEPS = (127, 63)  # in order: the second if the first overflows
MEASURED = (8, 128)  # numbers of rows for tests of products
SLOW = 8  # times the time of fp32: if slower, a product is a plain loop, because the processor lacks the instructions

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps x (R x K), its row maxima (R x 1) and a buffer like x to y without bias, divided by the maxima, R x N."""


ROUNDING = 1.5 * 2**23  # from 2^23 to 2^24, fp32 only has integers, and ends in their last 8 bits


def _rounds(weight: Tensor) -> Tensor:
    return torch.full((weight.size(1),), ROUNDING)  # torch is slower with a scalar


def _whole(x: Tensor, largest: Tensor, room: Tensor, steps: Tensor, rounding: Tensor) -> Tensor:
    """Return x_q for the scale *largest* / *steps*; undefined for rows of zeros, which are multiplied by 0 later.

    Like ``(x * steps / largest).round().to(torch.int8)``, in two passes instead of three.
    """
    return torch.addcmul(rounding, x, torch.div(steps, largest), out=room).view(torch.int32).to(torch.int8)


def _by_qlinear(weight: Tensor, scales: Tensor, steps: int) -> Product:
    """Build oneDNN's product, with the weight in blocks: the fastest for many rows, but expensive to call."""
    operation = torch.ops.onednn.qlinear_pointwise.default
    packed, scales = torch.ops.onednn.qlinear_prepack(weight, None), scales / steps
    zeros, limit, rounding = torch.zeros(len(weight), dtype=torch.int32), torch.tensor(float(steps)), _rounds(weight)

    def product(x: Tensor, largest: Tensor, room: Tensor) -> Tensor:
        rows = _whole(x, largest, room, limit, rounding)
        return operation(rows, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")

    return product


def _quantised(weight: Tensor, scales: Tensor):
    """Return a weight in FBGEMM's format; without FBGEMM, in the format of torch's other library."""
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():  # torch's quantised tensors are deprecated
        warnings.simplefilter("ignore")
        zeros = torch.zeros(len(weight), dtype=torch.long)
        rows = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
        try:
            if "fbgemm" in torch.backends.quantized.supported_engines:
                torch.backends.quantized.engine = "fbgemm"
            return torch.ops.quantized.linear_prepack(rows, None)
        finally:
            torch.backends.quantized.engine = engine


def _by_fbgemm(weight: Tensor, scales: Tensor, steps: int) -> Product:
    """Build FBGEMM's product, which rounds x while packing it. Its x_q are unsigned, with an offset."""
    operation = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    packed, offset = _quantised(weight, scales), steps + 1
    return lambda x, largest, room: operation(torch.div(x, largest, out=room), 1.0 / steps, offset, packed)


NATIVE = "native"
PRODUCTS: dict[str, Callable[[Tensor, Tensor, int], Product]] = {
    "qlinear": _by_qlinear,
    "fbgemm": _by_fbgemm,
}


def _extremes(rows: int, inputs: int, steps: int) -> Tensor:
    """Return a matrix of integers within *steps*; half of the rows give the largest possible sums."""
    whole = torch.arange(rows * inputs).mul(7919).remainder(2 * steps + 1).sub(steps).view(rows, inputs)
    whole[0::4], whole[2::4] = steps, -steps
    whole[:, :1] = steps
    return whole


def _ones(rows: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(rows, inputs), torch.ones(rows, 1), torch.empty(rows, inputs)


def _is_a_loop(product: Product, weight: Tensor) -> bool:
    inputs = _ones(MEASURED[0], weight.size(1))
    times = least_times({"fp32": lambda x, *_: F.linear(x, weight), "int8": product}, *inputs, rounds=2)
    return times["int8"] > SLOW * times["fp32"]


@torch.no_grad()
def _is_right(make, outputs: int, inputs: int, steps: int) -> bool:
    """Return whether this torch supports the product of *make*, with correct sums, and not by a plain loop."""
    weight, scales = _extremes(outputs, inputs, WEIGHT_STEPS), torch.ones(outputs)
    try:
        product = make(weight.to(torch.int8), scales, steps)
        if _is_a_loop(product, weight.float()):
            return False
        for rows in (1, *MEASURED):
            x = _extremes(rows, inputs, steps)
            sums = (x.double() @ weight.double().t()) / steps
            y = product(x.float() / steps, torch.ones(rows, 1), torch.empty(rows, inputs)).double()
            if float((y - sums).abs().max()) > 1e-6 * inputs * WEIGHT_STEPS:
                return False
    except (AttributeError, RuntimeError):
        return False
    return True


class Int8Kernels(NamedTuple):
    """Names of the products that are correct on this machine, in order, and the number of steps of x."""

    names: tuple[str, ...]
    steps: int


@functools.cache
def torch_kernels() -> Int8Kernels:
    """Return torch's products for this machine; no names if there are none."""
    for steps in INPUT_STEPS:
        names = tuple(name for name, make in PRODUCTS.items() if _is_right(make, 256, 256, steps))
        if names:
            return Int8Kernels(names, steps)
    return Int8Kernels((), INPUT_STEPS[-1])


def available_kernels() -> Int8Kernels:
    """Return the compiled kernels, or torch's products."""
    return torch_kernels() if load() is None else Int8Kernels((NATIVE,), WEIGHT_STEPS)


class Int8Linear(nn.Module):
    """Linear layer with a product in int8; input and output are in fp32, without gradients.

    Args:
        linear: the layer, on a CPU

    Raises:
        RuntimeError: torch does not have the product for this machine (see :func:`available_kernels`)
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        if not available_kernels().names:
            raise RuntimeError("this torch does not have int8 products for this machine: use fp32 or bf16")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.whole, self.scales = quantise(linear.weight.detach().float())
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach().float()
        self._prepare()

    def _prepare(self) -> None:
        names, steps = available_kernels()
        self.native = NativeLinear(self.whole, self.scales) if names[0] == NATIVE else None
        if self.native is None:
            self.product = PRODUCTS[names[0]](self.whole, self.scales, steps)

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
