"""Structures of the kernels, as declared in their headers, and their descriptions of modules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..norms import RmsNorm
from .packed import LinearStruct

NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2


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
                ("source", AttentionStruct),
                *((name, LinearStruct) for name in ("source_keys", "source_values", "fc1", "gate", "fc2")),
                ("activation", ctypes.c_int64), ("scales", ctypes.c_float * 3)]  # fmt: skip


class DecoderStruct(ctypes.Structure):
    """``Decoder`` of ``stacks.h``."""

    _fields_ = [("layers", ctypes.c_void_p), ("count", ctypes.c_int64), ("embedding", ctypes.c_void_p),
                ("scale", ctypes.c_double), ("embedding_norm", NormStruct), ("final_norm", NormStruct),
                ("output", LinearStruct)]  # fmt: skip


class KeysStruct(ctypes.Structure):
    """``Keys`` of ``attention.h``."""

    _fields_ = [("target", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("to_values", "capacity")),
                *((f"source_{name}", ctypes.c_void_p) for name in ("keys", "values", "bias")),
                *((name, ctypes.c_int64) for name in ("sources", "source_length", "bias_stride"))]  # fmt: skip


class SourceStruct(ctypes.Structure):
    """``Source`` of ``layers.h``."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("sentences", "length", "threads")),
                ("bias", ctypes.c_void_p), ("bias_stride", ctypes.c_int64),
                *((name, ctypes.c_void_p) for name in ("cos", "sin"))]  # fmt: skip


class StepStruct(ctypes.Structure):
    """``Step`` of ``attention.h``."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("sentences", "beam", "length", "threads", "past")),
                ("seen", ctypes.c_void_p), ("stride", ctypes.c_int64), ("places", ctypes.c_void_p),
                *((name, ctypes.c_void_p) for name in ("cos", "sin"))]  # fmt: skip


class LstmStruct(ctypes.Structure):
    """``Lstm`` of ``step.cpp``."""

    _fields_ = [*((name, LinearStruct) for name in ("fc1", "fc2", "gates")), ("hidden", NormStruct),
                ("gate_weight", ctypes.c_void_p), ("gate_bias", ctypes.c_void_p),
                ("gate_eps", ctypes.c_double)]  # fmt: skip


class Unsupported(Exception):
    """Raised if the kernels do not support a module."""


MISSING = object()


class Reads:
    """Attributes of modules that a description for the kernels was made from.

    The description is current while none of them is replaced. It owns the memory at its addresses.
    """

    def __init__(self) -> None:
        self._read: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[tuple[dict, int]] = []
        self.kept: list[Tensor] = []

    def __call__(self, module: nn.Module, name: str) -> Any:
        """Return the attribute *name* of *module*; None if it has none."""
        tables = (module.__dict__, module._parameters, module._buffers, module._modules)
        table = next((table for table in tables if name in table), module.__dict__)
        self._read.append((table, name, table.get(name, MISSING)))
        return getattr(module, name, None)

    def run_whole(self, module: nn.Module) -> None:
        """Note that the kernels replace the call of *module*, which must have no hooks."""
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self._hooks.append((hooks, len(hooks)))
            if hooks:
                raise Unsupported

    def are_current(self) -> bool:
        """Return whether all attributes are still those that were read."""
        same = all(table.get(name, MISSING) is value for table, name, value in self._read)
        return same and all(len(hooks) == count for hooks, count in self._hooks)

    def address(self, module: nn.Module, name: str) -> int:
        """Return the address of a contiguous fp32 tensor in main memory."""
        tensor = self(module, name)
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise Unsupported
        self.kept.append(tensor.detach())  # owns the memory even if the data of a parameter is replaced
        return tensor.data_ptr()

    def norm(self, module: nn.Module, name: str) -> NormStruct:
        """Return the structure of a norm, with the addresses of its weights; for None, the structure without a norm."""
        norm = self(module, name)
        if norm is None or type(norm) is nn.Identity:
            return NormStruct(NO_NORM)
        if type(norm) is RmsNorm:
            return NormStruct(RMS_NORM, self.address(norm, "weight"), None, self(norm, "eps"))
        if type(norm) is nn.LayerNorm and norm.bias is not None:
            return NormStruct(LAYER_NORM, self.address(norm, "weight"), self.address(norm, "bias"), self(norm, "eps"))
        raise Unsupported

    def linear(self, module: nn.Module, name: str) -> LinearStruct:
        """Return the structure of the linear layer *name* of *module*, whose weight must be packed."""
        linear = self(module, name)
        if linear is None:
            raise Unsupported
        return self.packed(linear)

    def packed(self, linear: nn.Module) -> LinearStruct:
        """Return the structure of a module with a packed weight."""
        native = self(linear, "native")
        if native is None:
            raise Unsupported
        struct = LinearStruct.from_buffer_copy(native.struct)
        struct.bias = None if self(linear, "bias") is None else self.address(linear, "bias")
        return struct


class Described:
    """Descriptions of modules for the kernels, until a module is deleted or a part is replaced.

    Args:
        describe: makes a description from a module, :class:`Reads` and other arguments, or raises :class:`Unsupported`
    """

    def __init__(self, describe: Callable[..., Any]):
        self._describe = describe
        self._known: WeakKeyDictionary[nn.Module, tuple[Reads, Any]] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, *others: Any) -> Any:
        """Return the description of *module*, which always has the same *others*; None if it is not supported."""
        known = self._known.get(module)
        if known is None or not known[0].are_current():
            reads = Reads()
            try:
                known = reads, self._describe(module, reads, *others)
            except Unsupported:
                known = reads, None
            self._known[module] = known
        return known[1]
