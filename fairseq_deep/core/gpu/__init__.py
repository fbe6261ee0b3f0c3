"""Triton kernels for training on a GPU: rows of DLCL's sums, gates and cell of the depth-wise LSTM.

torch's builds for GPUs include Triton, which also needs a C compiler with Python's headers. Without them, torch's
operations compute the same, and so they do with ``FAIRSEQ_DEEP_TRITON=0`` in the environment. Tests run the kernels on
a CPU, by Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.errors import is_switched_off, one_line

logger = logging.getLogger(__name__)
on_cpu = False
"""Whether kernels also run for tensors on a CPU; for tests with Triton's interpreter."""
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def _load(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module of the kernels, after one has run; None, with a warning, if it does not."""
    if is_switched_off("FAIRSEQ_DEEP_TRITON"):
        return None
    try:
        from . import kernels

        entry = torch.zeros(16, dtype=dtype, device=device)
        weights = torch.zeros(1, dtype=torch.promote_types(dtype, torch.float32), device=device)
        kernels.append_row(entry, torch.zeros_like(entry), weights, 0, 0)
    except Exception as error:  # no Triton, compiler, headers or writable cache, or an unsupported GPU or type
        why = f"without Triton's kernels, which fail for {dtype} ({one_line(error, 300)})"
        logger.warning(f"DLCL and the depth-wise LSTM train more slowly on this GPU {why}")
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
    return _load(first.device, first.dtype) if alike else None
