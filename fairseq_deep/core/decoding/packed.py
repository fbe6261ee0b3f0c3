"""Linear layers in fp32 for decoding on a CPU, with weights laid out as the machine's products want them.

y = x W^T + b. W lies in memory in one of three forms: "rows", as training leaves it; "columns", transposed, which
spares the product a transposition of its own, and in panels if it is wide; "blocks", oneDNN's own form. Which is the
fastest depends on the processor, on the shape of W and on the number of rows of x, so it is measured, once for each
shape, for few rows and for many.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import autocasts
from fairseq_deep.core.native import load
from fairseq_deep.core.native.packed import NativeLinear

from .timing import FEW, MEASURED, PART, fastest

PANEL = 512  # columns
COPIES = 64  # at most
COLD = 48_000_000  # bytes of weights that are measured in turns: in a model, none is in the cache when its turn comes


def in_blocks(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The product by *weight*, of fp32 or bf16, in oneDNN's form.

    Raises:
        AttributeError, RuntimeError: this torch or this machine has none
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _in_columns(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    if len(weight) >= 2 * PANEL:
        return _in_panels(weight)
    columns = weight.t().contiguous()
    return lambda x, bias: torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)


def _in_panels(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Columns, of which so many lie together that a row of them is within a page of memory."""
    panels = [(start, weight[start : start + PANEL].t().contiguous()) for start in range(0, len(weight), PANEL)]

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(len(x), len(weight))
        for start, panel in panels:
            part = y[:, start : start + panel.size(1)]
            if bias is None:
                torch.mm(x, panel, out=part)
            else:
                torch.addmm(bias[start : start + panel.size(1)], x, panel, out=part)
        return y

    return product


def _in_rows(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda x, bias: F.linear(x, weight, bias)


# in order: a later one is taken if it is clearly faster
FORMS = {"columns": _in_columns, "rows": _in_rows, "blocks": in_blocks}


class Choice(NamedTuple):
    """The names of the forms for few rows and for many."""

    few: str
    many: str


@functools.cache
def choose(outputs: int, inputs: int, threads: int) -> Choice:
    """The fastest forms of a weight of *outputs* x *inputs* on this machine, with so many *threads*."""
    weight = torch.ones(min(outputs, PART), inputs)
    copies = min(COLD // (4 * weight.numel()) + 1, COPIES)
    forms: dict[str, Callable] = {}
    for name, lay_out in FORMS.items():
        try:
            products = [lay_out(weight.clone()) for _ in range(copies)]
            products[0](weight[:1], None)
        except (AttributeError, RuntimeError):  # this torch or this machine has none
            continue
        forms[name] = _in_turns(products)
    return Choice(*(fastest(forms, torch.ones(rows, inputs), None) for rows in MEASURED))


def _in_turns(products: list[Callable]) -> Callable:
    turn = itertools.cycle(products)
    return lambda x, bias: next(turn)(x, bias)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a copy of its weight in the fastest form while that is on a CPU in fp32.

    Args:
        linear: the layer; its weight must not change any more, but by loading another
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.products: tuple[Callable, Callable] | None = None
        self.native: NativeLinear | None = None
        self._repack()

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)  # may move it to a GPU, or to another type
        self._repack()
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._repack()

    def _repack(self) -> None:
        self.products = self.native = None
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        if load() is not None:
            self.native = NativeLinear(self.weight)
            self.products = (self.native, self.native)
        else:
            choice = choose(self.out_features, self.in_features, torch.get_num_threads())
            with torch.no_grad():
                made = {name: FORMS[name](self.weight.detach()) for name in set(choice)}
            self.products = (made[choice.few], made[choice.many])

    def __getstate__(self):
        return {**self.__dict__, "products": None, "native": None}  # which can be neither copied nor pickled

    def forward(self, x: Tensor) -> Tensor:
        products = self.products
        if products is None or x.dtype != torch.float32 or torch.is_grad_enabled() or autocasts():
            return F.linear(x, self.weight, self.bias)
        if x.dim() == 2:
            return products[x.size(0) >= FEW](x, self.bias)
        rows = x.reshape(-1, self.in_features)  # torch would make a batch of products of some views
        y = products[rows.size(0) >= FEW](rows, self.bias)
        return y.view(x.shape[:-1] + y.shape[1:])
