"""Admin: adaptive model initialisation of a post-norm stack.

Understanding the Difficulty of Training Transformers, Liu et al., EMNLP 2020:

    x_{i+1} = LN(omega_i * x_i + F_i(x_i)),   omega_i a learned vector

for the residual connections i = 1 ... n of a stack (n = 2N in the encoder, 3M in the decoder, 2M with merged
attentions). Either all omega have an initial value in closed form, by the change of the output with the depth n:

    O(log n)   sqrt((n + 1) / ln(n + 1) - 1)        O(1)   sqrt(n)        O(n)   1

or they are profiled on the first batch, with omega_1 = 1 and omega_{i+1}^2 = Var[omega_i x_i] + Var[F_i(x_i)].
Matrices are initialised like in ``xavier.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.fields import Option
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base import INITS
from .xavier import Xavier

STARTS = ("logn", "1", "n", "profile")


def omega(start: str, connections: int) -> float:
    """Return the initial omega of *start*, one of ``STARTS``, for a number of residual connections; 1 for profiling."""
    if start == "logn":
        return math.sqrt((connections + 1) / math.log(connections + 1) - 1)
    return math.sqrt(connections) if start == "1" else 1.0


class WeightedConnection(ResidualConnection):
    """r = omega * x + F(x).

    Shapes:
        weight: sub-layers x C, omega
    """

    weighs_stream = True

    def __init__(self, stack: Stack, number: int, start: float):
        super().__init__(stack, number)
        self.weight = nn.Parameter(torch.full((self.sublayers, stack.dim), start))

    def stream_weight(self, sublayer: int) -> Tensor:
        return self.weight[sublayer]

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        return self.weight[sublayer] * x + output


@INITS.register("admin")
class Admin(Xavier):
    """Xavier matrices, omega in closed form or profiled.

    Args:
        stack: see :class:`Init`
        start: initial omega: "logn", "1", "n", or "profile"

    Raises:
        UsageError: *start* is unknown
    """

    paper = "Liu 2020"
    norms = ("post",)
    without_residual = False
    connects = True
    folds_stream = True
    options = {"start": Option("omega for outputs that change by O(log n) (logn), O(1) (1), O(n) (n), or profile")}

    def __init__(self, stack: Stack, start: str | float = "logn"):
        super().__init__(stack)
        self.start = str(start)  # from a configuration file, 1 is a number
        if self.start not in STARTS:
            raise UsageError(f"--admin-start {start} is unknown: use one of {', '.join(STARTS)}")
        self.omega = omega(self.start, self.connections)

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if str(options.get("start")) == "profile" and stack.layout.num_evaluations > 1:
            raise UsageError(
                f"--admin-start profile measures each layer once, --layer-agg {stack.aggregator.name} evaluates it "
                "several times: use another --admin-start"
            )
        if str(options.get("start")) == "profile" and stack.layerdrop:
            raise UsageError(
                f"--admin-start profile requires every layer of the {stack.side}: omit --{stack.side}-layerdrop"
            )

    def connection(self, number: int) -> ResidualConnection:
        return WeightedConnection(self.stack, number, self.omega)

    def prepare(self, stack: nn.Module) -> Callable[[], None] | None:
        if self.start != "profile":
            return None
        return Profiler([layer.residual for layer in stack.layers]).remove


class Profiler:
    """Sets omega during the forward pass of the first training batch, connection by connection.

    With several workers, variances are averaged over all workers, and their weights stay equal. If a batch is
    interrupted (fairseq skips a batch that does not fit into memory), profiling restarts with the next batch.

    Args:
        connections: the stack's :class:`WeightedConnection` modules, from the bottom

    Raises:
        UsageError: (at the first batch) the model is in half precision: the optimizer has already copied omega
    """

    def __init__(self, connections: list[nn.Module]):
        self.first, self.last = connections[0], connections[-1]
        self.variance = 1.0
        self.handles = [connection.register_forward_pre_hook(self._set) for connection in connections]

    def _set(self, connection: nn.Module, inputs) -> None:
        if not connection.training:
            return
        x, output, sublayer = inputs[:3]
        if connection.weight.dtype != torch.float32:
            raise UsageError(
                "--admin-start profile requires fp32 for its first update: train with --max-update 1 first, "
                "then in half precision with --finetune-from-model and another --save-dir"
            )
        if connection is self.first and sublayer == 0:
            self.variance = 1.0
        start = math.sqrt(self.variance)
        with torch.no_grad():
            connection.weight.data[sublayer] = start
            variance = (start * x.float()).var(unbiased=False) + output.float().var(unbiased=False)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(variance)
                variance /= torch.distributed.get_world_size()
        self.variance = float(variance)
        if connection is self.last and sublayer == len(connection.weight) - 1:
            self.remove()

    def remove(self) -> None:
        """Remove the hooks; omega is then no longer profiled."""
        for handle in self.handles:
            handle.remove()
