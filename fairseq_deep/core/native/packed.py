"""Packed weights of linear layers for the kernels, and their products."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from ..compat import autocasts, is_compiling
from .library import load

FLOAT, INT8 = 0, 1
ALIGNMENT = 64  # bytes
WEIGHT_STEPS = 127  # int8 values are within this


class LinearStruct(ctypes.Structure):
    """``Linear`` of ``products.h``."""

    _fields_ = [("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("kind", ctypes.c_int64),
                *((name, ctypes.c_void_p) for name in ("weight", "bias", "scales", "excess"))]  # fmt: skip


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for *count* numbers, aligned for vector instructions."""
    size = torch.empty((), dtype=dtype).element_size()
    room = torch.empty(count + ALIGNMENT // size, dtype=dtype)
    return room.narrow(0, -room.data_ptr() % ALIGNMENT // size, count)


class NativeLinear:
    """Linear map y = x W^T + b in the kernels, without gradients.

    Args:
        weight: W, outputs x inputs, in fp32 or int8
        scales: (int8) the factor of each output

    Raises:
        RuntimeError: this machine does not have kernels
    """

    def __init__(self, weight: Tensor, scales: Tensor | None = None):
        library = load()
        if library is None:
            raise RuntimeError("this machine does not have compiled kernels: use torch's operations")
        self._run = library.linear_product
        outputs, inputs = weight.shape
        panel, group = library.panel_width(), library.group_width()
        wide = -(-outputs // panel) * panel
        weight = weight.detach().contiguous()
        self.struct = LinearStruct(outputs, inputs, FLOAT if scales is None else INT8)
        sizes = ctypes.c_int64(outputs), ctypes.c_int64(inputs)
        if scales is None:
            packed = aligned(wide * inputs, torch.float32)
            library.pack_fp32(pointer(weight), *sizes, pointer(packed))
            self.memory: tuple[Tensor, ...] = (packed,)
        else:
            kind = torch.int8 if library.has_vnni() else torch.int16
            packed = aligned(wide * -(-inputs // group) * group, kind)
            excess, padded = aligned(wide, torch.int32), aligned(wide, torch.float32).zero_()
            padded[:outputs] = scales
            library.pack_int8(pointer(weight), *sizes, pointer(packed), pointer(excess))
            self.memory = (packed, padded, excess)
            self.struct.scales, self.struct.excess = padded.data_ptr(), excess.data_ptr()
        self.struct.weight = packed.data_ptr()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return y (rows x outputs) for x (rows x inputs), in fp32."""
        x, struct = x.contiguous(), self.struct
        y = torch.empty(x.size(0), struct.outputs)
        if bias is not None:  # a copy: other threads also use the structure
            struct = LinearStruct.from_buffer_copy(struct)
            struct.bias = bias.data_ptr()
        self._run(ctypes.byref(struct), pointer(x), pointer(y), ctypes.c_int64(x.size(0)),
                  ctypes.c_int64(torch.get_num_threads()))  # fmt: skip
        return y


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return W_q (int8), within 127, and the scale of each row: W is about scale W_q."""
    scales = (weight.abs().amax(dim=1) / WEIGHT_STEPS).clamp(min=1e-30)
    return (weight / scales.unsqueeze(1)).round_().to(torch.int8), scales


class PacksWeight(nn.Module):
    """Base class of modules with a ``weight`` that is packed for the kernels while it is on a CPU in fp32.

    Attributes:
        native: the packed weight; None without kernels, and before the first :meth:`repack`
        in_int8: the packed weight and its products are in int8
    """

    native: NativeLinear | None = None
    packs = in_int8 = False

    def repack(self) -> None:
        """Pack the weight, which may then only change by loading a state dict."""
        self.packs = True
        suited = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and load() is not None
        weight = quantise(self.weight.detach()) if self.in_int8 and suited else (self.weight,)
        self.native = NativeLinear(*weight) if suited else None

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)  # may change its device or type
        if self.packs:
            self.repack()
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        if self.packs:
            self.repack()

    def __getstate__(self):
        return {**self.__dict__, "native": None}  # addresses can be neither copied nor pickled

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.packs:
            self.repack()


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor."""
    return ctypes.c_void_p(tensor.data_ptr())


def runs_native(x: Tensor) -> bool:
    """Return whether the kernels support *x*: fp32 on a CPU, without gradients, autocast or a compiler."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()
    return plain and not is_compiling() and not autocasts() and load() is not None
