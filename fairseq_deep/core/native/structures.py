"""Structures of the kernels, as declared in their headers."""

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norms import RmsNorm
from .packed import LinearStruct

NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2
ACTIVATIONS = {F.relu: 1, F.silu: 2}


class NormStruct(ctypes.Structure):
    """``Norm`` of ``layers.h``."""

    _fields_ = [("kind", ctypes.c_int64), ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p),
                ("eps", ctypes.c_double)]  # fmt: skip


class AttentionStruct(ctypes.Structure):
    """``Attention`` of ``attention.h``."""

    _fields_ = [("input", LinearStruct), ("output", LinearStruct),
                *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim"))]  # fmt: skip


class LayerStruct(ctypes.Structure):
    """``Layer`` of ``layers.h``."""

    _fields_ = [("pre_norm", ctypes.c_int64), ("norms", NormStruct * 3), ("self", AttentionStruct),
                ("source", AttentionStruct), *((name, LinearStruct) for name in ("fc1", "gate", "fc2")),
                ("activation", ctypes.c_int64), ("scales", ctypes.c_float * 3)]  # fmt: skip


class KeysStruct(ctypes.Structure):
    """``Keys`` of ``attention.h``."""

    _fields_ = [("target", ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in ("to_values", "capacity", "past")),
                *((f"source_{name}", ctypes.c_void_p) for name in ("keys", "values", "bias")),
                *((name, ctypes.c_int64) for name in ("sources", "source_length", "bias_stride")),
                *((name, ctypes.c_void_p) for name in ("cos", "sin"))]  # fmt: skip


class SourceStruct(ctypes.Structure):
    """``Source`` of ``layers.h``."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("sentences", "length", "threads")),
                ("bias", ctypes.c_void_p), ("bias_stride", ctypes.c_int64),
                *((name, ctypes.c_void_p) for name in ("cos", "sin"))]  # fmt: skip


class StepStruct(ctypes.Structure):
    """``Step`` of ``attention.h``."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("sentences", "beam", "length", "threads", "finite")),
                ("seen", ctypes.c_void_p)]  # fmt: skip


class LstmStruct(ctypes.Structure):
    """``Lstm`` of ``step.cpp``."""

    _fields_ = [*((name, LinearStruct) for name in ("fc1", "fc2", "gates")), ("hidden", NormStruct),
                ("gate_weight", ctypes.c_void_p), ("gate_bias", ctypes.c_void_p),
                ("gate_eps", ctypes.c_double)]  # fmt: skip


class Unsupported(Exception):
    """Raised if the kernels do not support a module."""


Kept = list[object]
"""Objects that own the memory at the addresses in structures."""


class Built:
    """What was built for the kernels from modules, until a module is deleted or a part is replaced."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[nn.Module, tuple[list[object], Any]] = WeakKeyDictionary()

    def get(self, module: nn.Module, parts: list[object], build: Callable[[], Any]) -> Any:
        """Return the result of *build* for *module*, from an earlier call with the same *parts* if there was one.

        None if the kernels do not support the module.
        """
        kept = self._kept.get(module)
        if kept is None or any(one is not other for one, other in zip(kept[0], parts)):
            try:
                kept = parts, build()
            except Unsupported:
                kept = parts, None
            self._kept[module] = kept
        return kept[1]


def address(tensor: Tensor, kept: Kept) -> int:
    """Return the address of a contiguous fp32 tensor in main memory, which *kept* then owns too."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise Unsupported
    tensor = tensor.detach()
    kept.append(tensor)
    return tensor.data_ptr()


def norm_struct(norm: nn.Module, kept: Kept) -> NormStruct:
    """Return the structure of *norm*, with the addresses of its weights."""
    if type(norm) is nn.Identity:
        return NormStruct(NO_NORM)
    if type(norm) is RmsNorm:
        return NormStruct(RMS_NORM, address(norm.weight, kept), None, norm.eps)
    if type(norm) is nn.LayerNorm and norm.bias is not None:
        return NormStruct(LAYER_NORM, address(norm.weight, kept), address(norm.bias, kept), norm.eps)
    raise Unsupported


def linear_struct(linear: nn.Module, kept: Kept) -> LinearStruct:
    """Return the structure of a *linear* layer with a packed weight."""
    native = getattr(linear, "native", None)
    if native is None:
        raise Unsupported
    kept.append(native)
    struct = LinearStruct.from_buffer_copy(native.struct)
    struct.bias = None if linear.bias is None else address(linear.bias, kept)
    return struct
