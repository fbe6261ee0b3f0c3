"""Triton kernels for training on a GPU: rows of DLCL's sums, gates and cell of the depth-wise LSTM.

torch's builds for GPUs include Triton. Without it, torch's operations compute the same. Tests run the kernels on a CPU,
by Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from ..compat import is_compiling

logger = logging.getLogger(__name__)
on_cpu = False
"""Whether kernels also run for tensors on a CPU; for tests with Triton's interpreter."""
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def _load() -> ModuleType | None:
    try:
        from . import kernels
    except ImportError as error:
        logger.warning(f"DLCL and the depth-wise LSTM train more slowly on this GPU without Triton ({error})")
        return None
    return kernels


def find_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the module of the kernels, if they support *tensors*, all of one type on one device; else None."""
    first = tensors[0]
    if not (first.is_cuda or (on_cpu and first.device.type == "cpu")) or is_compiling() or first.dtype not in TYPES:
        return None
    # subclasses of tensors have no memory of their own
    alike = all(type(each) in (Tensor, nn.Parameter) and each.dtype == first.dtype and each.device == first.device
                for each in tensors)  # fmt: skip
    return _load() if alike else None
