"""``--compile``: ``torch.compile`` for layers and for the aggregators' modules in training.

Modules keep their parameters and names. Only their calls in training run compiled code, which all modules of a class
share for any number of modules and any batch size. Validation and generation run the uncompiled modules.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)
VARIANTS = 64  # graphs per function: with or without a mask, one sentence or many, ...


def graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _compile(function: Callable, backend: str) -> Callable:
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True)


class _Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))  # no random numbers: the run's random state must not change

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


@functools.cache
def why_not(device: torch.device, backend: str) -> str | None:
    """Return the reason why compilation fails on *device*, or None if two tiny modules can share compiled code."""
    try:
        before, function = graphs(), _compile(_Tiny.forward, backend)
        for _ in range(2):
            function(_Tiny().to(device), torch.ones(3, 2, device=device)).sum().backward()
        found = graphs() - before
    except Exception as error:  # no compiler, an unsupported Python, a broken installation: reported in the same way
        return _line(error)
    if found != 1:
        return "torch.compile is switched off" if found == 0 else "this torch recompiles every layer: use torch 2.5"
    return None


def _line(error: BaseException) -> str:
    """Return the most informative line of *error*: the first line of its cause, if it has one."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


class Compiler:
    """Compiles the calls of modules, once per class.

    Args:
        backend: backend of ``torch.compile``
        started: start time of the first step (``time.perf_counter``)
    """

    def __init__(self, backend: str, started: float):
        self.backend = backend
        self.functions: dict[type, Callable | None] = {}  # None: it cannot be compiled
        self.started: float | None = started
        self.before = graphs()

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run *module* in training."""
        kind = type(module)
        if kind not in self.functions:
            self.functions[kind] = _compile(kind.forward, self.backend)
        function = self.functions[kind]
        if function is None:
            return module._call_impl(*args, **kwargs)
        try:
            if "forward" in vars(module):  # set for recomputation: see wrap_layer
                return checkpoint(function, module, *args, use_reentrant=False, **kwargs)
            return function(module, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.functions[kind] = None
            logger.warning(f"--compile: {kind.__name__} is not compiled: {_line(error)}")
            return module._call_impl(*args, **kwargs)

    def report(self) -> None:
        """Log the number of compiled functions and the time of the first step."""
        if self.started is not None:
            seconds = time.perf_counter() - self.started
            logger.info(f"--compile: compiled {graphs() - self.before} functions; the first step took {seconds:.1f} s")
            self.started = None


class _Call:
    """Replacement for the call of a module: compiled in training, unchanged otherwise."""

    def __init__(self, module: nn.Module, compiler: Compiler):
        self.module, self.compiler = module, compiler

    def __call__(self, *args, **kwargs):
        if self.module.training and torch.is_grad_enabled():
            return self.compiler.run(self.module, args, kwargs)
        return self.module._call_impl(*args, **kwargs)


def compile_calls(modules: list[nn.Module], backend: str = "inductor") -> Compiler | None:
    """Compile all further calls of *modules* in training; log a warning and return None if this is not possible."""
    started = time.perf_counter()
    reason = why_not(next(modules[0].parameters()).device, backend) if modules else "there are no layers"
    if reason is not None:
        logger.warning(f"--compile has no effect here; training continues without it: {reason}")
        return None
    # each layer is its own graph, so DDP can start to reduce its gradients without splitting graphs
    torch._dynamo.config.optimize_ddp = False
    for limit in ("recompile_limit", "cache_size_limit"):  # the second name is from older versions of torch
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, max(VARIANTS, getattr(torch._dynamo.config, limit)))
            break
    compiler = Compiler(backend, started)
    for module in modules:
        # the attribute that nn.Module.compile() sets; torch neither copies nor saves it
        module._compiled_call_impl = _Call(module, compiler)
    return compiler
