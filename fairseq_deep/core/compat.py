"""What depends on the version of torch: features are tested, not version numbers."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


def skip_initialisation() -> Any:
    """A context in which modules are built without memory."""
    return torch.device("meta")


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing the caller; False with a torch that has none."""
    return hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling") and torch.compiler.is_compiling()


@functools.cache
def _autocast_question(device: str) -> Callable[[], bool]:
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 on, where the older functions warn
        return functools.partial(torch.is_autocast_enabled, device)
    return torch.is_autocast_cpu_enabled if device == "cpu" else torch.is_autocast_enabled


def autocasts(device: str = "cpu") -> bool:
    """Whether autocast is on for *device* ("cuda", "cpu")."""
    return _autocast_question(device)()


def no_autocast(tensor: Any) -> Any:
    """A context in which nothing that is computed on *tensor*'s device is lowered to half precision."""
    kind = tensor.device.type
    if kind == "meta":  # has no autocast, and the context refuses it
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
