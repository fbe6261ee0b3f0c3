"""Compatibility with several versions of torch; tests for features, not version numbers."""

import contextlib
from typing import Any

import torch


def skip_initialisation() -> Any:
    """Return a context in which modules are built without allocating memory."""
    return torch.device("meta")


def disable_cudnn_attention() -> None:
    """Have ``scaled_dot_product_attention`` use torch's own kernels instead of cuDNN's, in the whole process.

    cuDNN prepares a plan for each shape of a batch: about two seconds for a model on a busy H100 (torch 2.11). Batches
    of sentences have hundreds of shapes. torch 2.11 prefers cuDNN on Hopper GPUs.
    """
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):  # older torch has no such kernels
        torch.backends.cuda.enable_cudnn_sdp(False)


def is_compiling() -> bool:
    """Return whether torch.compile or torch.export is tracing the caller."""
    return torch.compiler.is_compiling()


def autocasts() -> bool:
    """Return whether autocast is enabled on the CPU."""
    return torch.is_autocast_enabled("cpu")


def no_autocast(tensor: Any) -> Any:
    """Return a context that disables autocast on *tensor*'s device."""
    kind = tensor.device.type
    if kind == "meta":  # autocast does not support it
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
