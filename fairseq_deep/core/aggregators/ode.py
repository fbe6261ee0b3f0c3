"""ODE Transformer: each encoder layer is a step of a Runge-Kutta method, which evaluates it several times.

ODE Transformer: An Ordinary Differential Equation-Inspired Model for Sequence Generation, Li et al., ACL 2022. With F
the change that a layer makes, F(x) = layer(x) - x, its output for the input x is

    y = x + sum_i b_i F_i,    F_i = F(x + sum_{j<i} a_ij F_j),    i = 1 ... k

``rk2``, ``rk3``, ``rk4``: Heun's method, Kutta's method of the third order, the classical method of the fourth:

    k = 2    F_2 at x + F_1                                                  b = 1/2, 1/2
    k = 3    F_2 at x + F_1/2, F_3 at x - F_1 + 2 F_2                        b = 1/6, 4/6, 1/6
    k = 4    F_2 at x + F_1/2, F_3 at x + F_2/2, F_4 at x + F_3              b = 1/6, 2/6, 2/6, 1/6

The others learn b, with one set of coefficients for the whole encoder:

    ``rk2-learned``    b = g, 1 - g with g = sigmoid(W [F_1; F_2] + c), a number at each position
    ``rk2-init``       b = two scalars, which start at 1
    ``ema``            b_i = a (1 - a)^{k-i}, where a starts at 1/2: Predictor-Corrector Enhanced Transformers with
                       Exponential Moving Average Coefficient Learning, Li et al., NeurIPS 2024, without its corrector

``ema`` evaluates at the points of the fixed method with the same number of evaluations, like its authors' code. With
one evaluation there is nothing to weight, and the stack is the plain one.

Points and changes are linear in x and the outputs o_i of the layer, with F_i = o_i - p_i for the point p_i. Each of
them, and y if b is fixed, is therefore one sum over x, o_1, o_2, ..., in fp32.

Names here: ``gate`` has W and c, ``alpha`` is a, ``scalars`` are the b of rk2-init. ``identity`` uses F(x) = layer(x),
including the layer's residual connections, like the released code of the 2022 paper.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import KeepFp32, widened
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, MethodConfig, Stack
from fairseq_deep.core.xavier import fill_xavier

from .base import AGGREGATORS, Aggregator
from .weighted_sum import weighted_sums

# a_ij by the number of evaluations; the first is at x
POINTS = {
    1: [[0.0]],
    2: [[0.0], [1.0]],
    3: [[0.0], [0.5], [-1.0, 2.0]],
    4: [[0.0], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0]],
}
FIXED = {"rk2": [1 / 2, 1 / 2], "rk3": [1 / 6, 4 / 6, 1 / 6], "rk4": [1 / 6, 2 / 6, 2 / 6, 1 / 6]}
METHODS = (*FIXED, "rk2-learned", "rk2-init", "ema")
HISTORIES = ("residual", "dlcl")


def evaluations(method: str = "rk2", order: int | None = None) -> int:
    """Return the number of evaluations per layer; *order* is for ema."""
    return order or 2 if method == "ema" else int(method[2])


def _rows(count: int, identity: bool) -> tuple[list[list[float]], list[list[float]]]:
    """Return the coefficients of the points p_1 ... p_k and the changes F_1 ... F_k as sums over x, o_1, ..., o_k.

    Args:
        count: evaluations k
        identity: F(x) = layer(x)
    """
    points: list[list[float]] = []
    changes: list[list[float]] = []
    for number, factors in enumerate(POINTS[count], 1):
        points.append(_added([1.0] + [0.0] * count, factors, changes))
        change = [0.0 if identity else -value for value in points[-1]]
        change[number] += 1.0
        changes.append(change)
    return points, changes


def _added(row: list[float], factors: list[float], rows: list[list[float]]) -> list[float]:
    """Return *row* plus *factors* times *rows*."""
    for factor, other in zip(factors, rows):
        row = [value + factor * change for value, change in zip(row, other)]
    return row


def combined(row: list[float], tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of *tensors* times the non-zero factors in *row*, in fp32 (or fp64), rounded to *dtype* once.

    The changes are small differences of large numbers: intermediate results must not be rounded to half precision.
    """
    pairs = [(factor, tensor) for factor, tensor in zip(row, tensors) if factor != 0.0]
    if len(pairs) == 1 and pairs[0][0] == 1.0:
        return pairs[0][1].to(dtype)
    total = widened(pairs[0][1]) * pairs[0][0]
    for factor, tensor in pairs[1:]:
        total = total.add_(tensor, alpha=factor)
    return total.to(dtype)


@AGGREGATORS.register("ode")
class Ode(KeepFp32, Aggregator):
    """Runge-Kutta steps in an encoder, over the plain stack or over DLCL; a decoder has only the inner aggregator.

    Args:
        stack: see :class:`Aggregator`
        method: rk2, rk3, rk4, rk2-learned, rk2-init or ema
        order: evaluations of a layer with ema, 1 to 4 (default: 2)
        history: name of the aggregator that connects the layers, residual or dlcl
        identity: F(x) = layer(x). Activations then more than double in each layer, which requires the norms of DLCL's
            entries
        inner: the aggregator *history* with its options

    Shapes:
        gate.weight: 1 x 2C (rk2-learned)
        scalars: 2 (rk2-init)
        alpha: 1 (ema)

    Raises:
        UsageError: a value is unknown, or *identity* lacks the norms that it requires
    """

    paper = "Li 2022"
    architectures = {
        "ode_6l": ("pre", (6, 6), {"ode_method": "rk2-learned", "ode_history": "dlcl"}),
        "ode_rk2_6l": ("pre", (6, 6), {"ode_method": "rk2"}),
        "ode_rk4_6l": ("pre", (6, 6), {"ode_method": "rk4"}),
        "ode_ema_6l": ("pre", (6, 6), {"ode_method": "ema"}),
    }
    encoder_only = True
    options = {
        "method": Option("weighting of evaluations", METHODS),
        "order": Option("evaluations of a layer with --ode-method ema, 1 to 4 (default: 2)", Range(1, len(POINTS)),
                        needs=("method", ("ema",))),
        "history": Option("connections between layers", HISTORIES),
        "identity": Option("F(x) = layer(x), as in the released code; with --ode-history dlcl"),
    }  # fmt: skip

    def __init__(
        self,
        stack: Stack,
        method: str = "rk2",
        order: int | None = None,
        history: str = "residual",
        identity: bool = False,
        inner: MethodConfig | None = None,
    ):
        super().__init__(stack)
        if inner is None:
            history = self.inner_method({"history": history})
            inner = MethodConfig(history, AGGREGATORS.get(history))
        count = evaluations(method, order)
        self._check_identity(stack, identity, count, inner)
        self.inner = inner.build(stack)
        self.num_evaluations = count if stack.side == "encoder" else 1
        self.identity = identity and self.num_evaluations > 1
        learned = method if self.num_evaluations > 1 else ""
        self.fixed = FIXED.get(learned, [1.0])
        self.gate = nn.Linear(2 * self.dim, 1) if learned == "rk2-learned" else None
        self.scalars = nn.Parameter(torch.ones(2)) if learned == "rk2-init" else None
        self.alpha = nn.Parameter(torch.full((1,), 0.5)) if learned == "ema" else None
        if self.gate is not None:
            fill_xavier(self.gate)
        self.points, self.changes = _rows(self.num_evaluations, self.identity)
        self.total = _added(self.points[0], self.fixed, self.changes)

    @classmethod
    def inner_method(cls, options: dict[str, Any]) -> str:
        return options.get("history", "residual")

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        count = evaluations(options.get("method", "rk2"), options.get("order"))
        return Layout(num_evaluations=count if side == "encoder" else 1)

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        inner = options["inner"]
        inner.method.check(stack, other, inner.options)
        cls._check_identity(stack, bool(options.get("identity")), cls.layout("encoder", options).num_evaluations, inner)

    @staticmethod
    def _check_identity(stack: Stack, identity: bool, count: int, inner: MethodConfig) -> None:
        if not identity or stack.side != "encoder":
            return
        if count == 1:
            raise UsageError("--ode-identity has no effect with --ode-order 1: omit one of them")
        if inner.name != "dlcl":
            raise UsageError(
                "--ode-identity lets activations more than double in each layer, and "
                f"--ode-history {inner.name} has no norms to prevent this: add --ode-history dlcl, or omit it"
            )
        if not stack.pre_norm:
            raise UsageError("--ode-identity requires the norms of pre-norm DLCL: use a pre-norm encoder, or omit it")
        if inner.options.get("no_norm"):
            raise UsageError("--ode-identity requires the norms that --dlcl-no-norm removes: omit one of them")

    def fp32_tensors(self) -> list[Tensor]:
        """Return the coefficients: their gradients sum over all positions and features; *history* has its own rule."""
        return [value for name, value in self.named_parameters() if not name.startswith("inner.")]

    def tie(self, other: Aggregator) -> None:
        if isinstance(other, Ode):
            self.inner.tie(other.inner)

    def matrices(self) -> list[Tensor]:
        return self.inner.matrices()

    def weights(self) -> Tensor | None:
        return self.inner.weights()

    def record(self) -> dict[str, Tensor]:
        found = dict(self.inner.record())
        if self.alpha is not None:
            found["alpha"] = self.alpha.detach()[0]
        if self.scalars is not None:
            found["first"], found["second"] = self.scalars.detach().unbind()
        return found

    def start(self, x: Tensor) -> list[Tensor]:
        return self.inner.start(x)

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return self.inner.read(state, layer)

    def next_input(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        return combined(self.points[len(outputs)], [x, *outputs], x.dtype)

    def combine(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        tensors = [x, *outputs]
        if self.gate is None and self.scalars is None and self.alpha is None:
            return combined(self.total, tensors, x.dtype)
        exact = torch.promote_types(x.dtype, torch.float32)
        changes = [combined(row, tensors, exact) for row in self.changes]
        return (x + self._increment(changes)).to(x.dtype)

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        return self.inner.write(state, layer, output)

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return self.inner.layer_output(state, output)

    def finish(self, state: list[Tensor]) -> Tensor:
        return self.inner.finish(state)

    def _increment(self, changes: list[Tensor]) -> Tensor:
        """Return sum_i b_i F_i with learned b."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(torch.cat(changes, dim=-1)).to(changes[0].dtype))  # autocast lowers it
            return torch.lerp(changes[1], changes[0], gate)
        if self.scalars is not None:
            return weighted_sums(self.scalars.unsqueeze(0), changes)[0]
        weights = [self.alpha]
        for _ in range(len(changes) - 1):
            weights = [weights[0] * (1 - self.alpha)] + weights
        return weighted_sums(torch.cat(weights).unsqueeze(0), changes)[0]
