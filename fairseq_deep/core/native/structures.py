"""Structures of the kernels, as declared in ``step.cpp`` and its headers."""

import ctypes

import torch
from torch import Tensor, nn

from ..norms import RmsNorm
from .packed import LinearStruct

NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2


class NormStruct(ctypes.Structure):
    """``Norm`` of ``step.cpp``."""

    _fields_ = [("kind", ctypes.c_int64), ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p),
                ("eps", ctypes.c_double)]  # fmt: skip


class AttentionStruct(ctypes.Structure):
    """``Attention`` of ``attention.h``."""

    _fields_ = [("input", LinearStruct), ("output", LinearStruct),
                *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim"))]  # fmt: skip


class LayerStruct(ctypes.Structure):
    """``Layer`` of ``step.cpp``."""

    _fields_ = [("pre_norm", ctypes.c_int64), ("norms", NormStruct * 3), ("self", AttentionStruct),
                ("source", AttentionStruct), ("fc1", LinearStruct), ("fc2", LinearStruct)]  # fmt: skip


class KeysStruct(ctypes.Structure):
    """``Keys`` of ``attention.h``."""

    _fields_ = [("target", ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in ("to_values", "capacity", "past")),
                *((f"source_{name}", ctypes.c_void_p) for name in ("keys", "values", "bias")),
                *((name, ctypes.c_int64) for name in ("sources", "source_length", "bias_stride"))]  # fmt: skip


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


def _check_tensor(tensor: Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise Unsupported


def _check(norm: nn.Module) -> None:
    for parameter in norm.parameters():
        _check_tensor(parameter)


def norm_struct(norm: nn.Module) -> NormStruct:
    """Return the structure of *norm*, with the addresses of its weights."""
    if type(norm) is nn.Identity:
        return NormStruct(NO_NORM)
    _check(norm)
    if type(norm) is RmsNorm:
        return NormStruct(RMS_NORM, norm.weight.data_ptr(), None, norm.eps)
    if type(norm) is nn.LayerNorm and norm.bias is not None:
        return NormStruct(LAYER_NORM, norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
    raise Unsupported


def linear_struct(linear: nn.Module) -> LinearStruct:
    """Return the structure of a *linear* layer with a packed weight."""
    native = getattr(linear, "native", None)
    if native is None:
        raise Unsupported
    if isinstance(linear, nn.Module) and linear.bias is not None:
        _check_tensor(linear.bias)
    struct = LinearStruct.from_buffer_copy(native.struct)
    struct.bias = None if linear.bias is None else linear.bias.data_ptr()
    return struct
