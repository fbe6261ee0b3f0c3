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

``ema`` evaluates where the method with as many evaluations does, as its authors' code does. With one evaluation nothing
is left to weigh, and the stack is the plain one.

Names here: ``gate`` has W and c, ``alpha`` is a, ``scalars`` are the b of rk2-init. ``identity`` takes F(x) = layer(x),
with the layer's residual connections, as the released code of the 2022 paper does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError, nearest
from fairseq_deep.core.stack import Layout, MethodConfig, Stack

from .base import AGGREGATORS, Aggregator
from .weighted_sum import weighted_sum

# a_ij by the number of evaluations; the first is at x
POINTS = {
    1: [[0.0]],
    2: [[0.0], [1.0]],
    3: [[0.0], [0.5], [-1.0, 2.0]],
    4: [[0.0], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0]],
}
FIXED = {"rk2": [1 / 2, 1 / 2], "rk3": [1 / 6, 4 / 6, 1 / 6], "rk4": [1 / 6, 2 / 6, 2 / 6, 1 / 6]}
LEARNED = ("rk2-learned", "rk2-init", "ema")
HISTORIES = ("residual", "dlcl")


def evaluations(method: str = "rk2", order: int | None = None) -> int:
    """How often a layer is evaluated.

    Raises:
        UsageError: the method is unknown, or has not that order
    """
    methods = (*FIXED, *LEARNED)
    if method not in methods:
        raise UsageError(
            f"--ode-method {method} is unknown{nearest(method, methods)}: use one of {', '.join(methods)}"
        )
    if method != "ema":
        if order is not None:
            raise UsageError(
                f"--ode-order is for --ode-method ema, {method} has its own: leave it out, or use rk2, rk3 or rk4"
            )
        return int(method[2])
    if order is not None and order not in POINTS:
        raise UsageError(f"--ode-order {order}: ema has points for 1 to {len(POINTS)} evaluations, use one of these")
    return 2 if order is None else order


def _exact(x: Tensor) -> Tensor:
    """*x* in fp32, or in fp64 if that is what it has: small differences of large numbers are taken."""
    return x if x.dtype == torch.float64 else x.float()


@AGGREGATORS.register("ode")
class Ode(KeepFp32, Aggregator):
    """Runge-Kutta steps in an encoder, over the plain stack or over DLCL; a decoder has the inner aggregator alone.

    Args:
        stack: see :class:`Aggregator`
        method: rk2, rk3, rk4, rk2-learned, rk2-init or ema
        order: evaluations of a layer with ema, 1 to 4 (default: 2)
        history: name of the aggregator that connects the layers, residual or dlcl
        identity: F(x) = layer(x). Activations then more than double in each layer, so that the norms of DLCL's entries
            must follow
        inner: the aggregator *history* with its options

    Shapes:
        gate.weight: 1 x 2C (rk2-learned)
        scalars: 2 (rk2-init)
        alpha: 1 (ema)

    Raises:
        UsageError: a value is unknown, or *identity* is without the norms that it needs
    """

    paper = "Li 2022"
    encoder_only = True

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
        self.points = POINTS[self.num_evaluations]
        learned = method if self.num_evaluations > 1 else ""
        self.fixed = FIXED.get(learned, [1.0])
        self.gate = nn.Linear(2 * self.dim, 1) if learned == "rk2-learned" else None
        self.scalars = nn.Parameter(torch.ones(2)) if learned == "rk2-init" else None
        self.alpha = nn.Parameter(torch.full((1,), 0.5)) if learned == "ema" else None
        if self.gate is not None:
            nn.init.xavier_uniform_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    @staticmethod
    def add_args(parser) -> None:
        parser.add_argument("--ode-method", metavar="NAME",
                            help=f"ODE Transformer: how evaluations are weighted: {', '.join((*FIXED, *LEARNED))} "
                            "(default: rk2)")  # fmt: skip
        parser.add_argument("--ode-order", type=int, metavar="K",
                            help="ODE Transformer: evaluations of a layer with --ode-method ema, 1 to 4 (default: 2)")
        parser.add_argument("--ode-history", metavar="NAME",
                            help="ODE Transformer: how layers are connected: residual (the default) or dlcl")
        parser.add_argument("--ode-identity", action="store_true",
                            help="ODE Transformer: F(x) = layer(x), as in the released code; with --ode-history dlcl")

    @classmethod
    def inner_method(cls, options: dict[str, Any]) -> str:
        history = options.get("history", "residual")
        if history not in HISTORIES:
            raise UsageError(
                f"--ode-history {history} is unknown{nearest(history, HISTORIES)}: use one of {', '.join(HISTORIES)}"
            )
        return history

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
            raise UsageError("--ode-identity has no effect with --ode-order 1: leave one of them out")
        if inner.name != "dlcl":
            raise UsageError(
                "--ode-identity lets activations more than double in each layer, and "
                f"--ode-history {inner.name} has no norms against that: add --ode-history dlcl, or leave it out"
            )
        if not stack.pre_norm:
            raise UsageError("--ode-identity needs the norms of pre-norm DLCL: use a pre-norm encoder, or leave it out")
        if inner.options.get("no_norm"):
            raise UsageError("--ode-identity needs the norms that --dlcl-no-norm leaves out: leave one of them out")

    def fp32_tensors(self) -> list[Tensor]:
        """The coefficients, whose gradients sum over all positions and features; the history has a rule of its own."""
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
        return self._point(x, self._changes(x, outputs))

    def combine(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        return (_exact(x) + self._increment(self._changes(x, outputs))).to(x.dtype)

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        return self.inner.write(state, layer, output)

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return self.inner.layer_output(state, output)

    def finish(self, state: list[Tensor]) -> Tensor:
        return self.inner.finish(state)

    def _point(self, x: Tensor, changes: list[Tensor]) -> Tensor:
        """Where the layer is evaluated after F_1, F_2, ..., in the type of *x*."""
        point = x
        for factor, change in zip(self.points[len(changes)], changes):
            if factor != 0.0:
                point = torch.add(_exact(point), change, alpha=factor)
        return point.to(x.dtype)

    def _changes(self, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        """F_1, F_2, ... of the layer that gave *outputs*."""
        changes: list[Tensor] = []
        for output in outputs:
            change = _exact(output)
            if not self.identity:
                change = change - _exact(self._point(x, changes))
            changes.append(change)
        return changes

    def _increment(self, changes: list[Tensor]) -> Tensor:
        """sum_i b_i F_i."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(torch.cat(changes, dim=-1)).to(changes[0].dtype))  # autocast lowers it
            return changes[1] + gate * (changes[0] - changes[1])
        if self.scalars is not None:
            return weighted_sum(self.scalars.unsqueeze(1), changes)
        if self.alpha is not None:
            weights = [self.alpha]
            for _ in range(len(changes) - 1):
                weights = [weights[0] * (1 - self.alpha)] + weights
            return weighted_sum(torch.stack(weights), changes)
        total = changes[0] * self.fixed[0]
        for weight, change in zip(self.fixed[1:], changes[1:]):
            total = torch.add(total, change, alpha=weight)
        return total
