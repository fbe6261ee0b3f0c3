"""``--compile``: ``torch.compile`` for what a training step runs often, each layer and what aggregators name.

Modules keep their parameters and names; only their calls in training go to compiled code, which all modules of a class
share, whatever their number and the sizes of a batch. Validation, generation and whatever else calls them is as ever.
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
VARIANTS = 64  # of one function: with or without a mask, one sentence or many, ...


def graphs() -> int:
    """How many graphs this process has compiled."""
    from torch._dynamo.utils import counters  # not with torch 1.13

    return counters["stats"]["unique_graphs"]


def _compile(function: Callable, backend: str) -> Callable:
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True)


class _Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))  # no random numbers: the training's own are still to come

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


@functools.cache
def why_not(device: torch.device, backend: str) -> str | None:
    """Why nothing can be compiled for *device*, in one line; None where two tiny modules have shared compiled code."""
    if not hasattr(torch, "compile"):
        return f"torch {torch.__version__} has no torch.compile"
    try:
        before, function = graphs(), _compile(_Tiny.forward, backend)
        for _ in range(2):
            function(_Tiny().to(device), torch.ones(3, 2, device=device)).sum().backward()
        found = graphs() - before
    except Exception as error:  # no compiler, another Python, a broken installation: all is told in the same way
        return _line(error)
    if found != 1:
        return "torch.compile is switched off" if found == 0 else "this torch recompiles every layer: it needs 2.5"
    return None


def _line(error: BaseException) -> str:
    """The line of *error* that says most: of its cause, where it is about another one."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


class Compiler:
    """Compiles the calls of modules, once for each of their classes.

    Args:
        backend: of ``torch.compile``
        started: when the first step began (``time.perf_counter``)
    """

    def __init__(self, backend: str, started: float):
        self.backend = backend
        self.functions: dict[type, Callable | None] = {}  # None: it cannot be compiled
        self.started: float | None = started
        self.before = graphs()

    def run(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call of *module* in training."""
        kind = type(module)
        if kind not in self.functions:
            self.functions[kind] = _compile(kind.forward, self.backend)
        function = self.functions[kind]
        if function is None:
            return module._call_impl(*args, **kwargs)
        # one layout, one variant: the first layer of a stack gets a transposed view, all others what one returned
        args = tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)
        try:
            if "forward" in vars(module):  # of recomputation: see wrap_layer
                return checkpoint(function, module, *args, use_reentrant=False, **kwargs)
            return function(module, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.functions[kind] = None
            logger.warning(f"--compile: {kind.__name__} stays as it is: {_line(error)}")
            return module._call_impl(*args, **kwargs)

    def report(self) -> None:
        """Log what the first step has cost."""
        if self.started is not None:
            seconds = time.perf_counter() - self.started
            logger.info(f"--compile: compiled {graphs() - self.before} functions; the first step took {seconds:.1f} s")
            self.started = None


class _Call:
    """Stands for the call of a module."""

    def __init__(self, module: nn.Module, compiler: Compiler):
        self.module, self.compiler = module, compiler

    def __call__(self, *args, **kwargs):
        if self.module.training and torch.is_grad_enabled():
            return self.compiler.run(self.module, args, kwargs)
        return self.module._call_impl(*args, **kwargs)


def compile_calls(modules: list[nn.Module], backend: str = "inductor") -> Compiler | None:
    """Compile the calls of *modules* in training from now on; None, after a warning, where it cannot be done."""
    started = time.perf_counter()
    reason = why_not(next(modules[0].parameters()).device, backend) if modules else "there are no layers"
    if reason is not None:
        logger.warning(f"--compile has no effect here, training goes on without it: {reason}")
        return None
    # gradients of a layer are there when its backward pass ends: DDP need not split graphs to begin early
    torch._dynamo.config.optimize_ddp = False
    for limit in ("recompile_limit", "cache_size_limit"):  # its name, and that in older versions of torch
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, max(VARIANTS, getattr(torch._dynamo.config, limit)))
            break
    compiler = Compiler(backend, started)
    for module in modules:
        # where nn.Module.compile() puts what it makes of one module: it is neither copied nor saved
        module._compiled_call_impl = _Call(module, compiler)
    return compiler
