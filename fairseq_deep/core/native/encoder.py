"""Encoders in compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import describe_layer
from .library import load
from .packed import pointer, runs_native
from .structures import Described, LayerStruct, Reads, SourceStruct

LayerCall = Callable[..., tuple[Tensor, None]]
"""Maps the input of a layer (T x B x C), and arguments that are not used, to its output and no attention weights."""


class NativeEncoder:
    """The layers of an encoder in compiled kernels.

    Args:
        encoder: the encoder, in evaluation mode
        reads: notes the attributes that the kernels depend on

    Raises:
        Unsupported: the kernels do not support one of the layers
    """

    def __init__(self, encoder: nn.Module, reads: Reads):
        layers = reads(encoder, "layers")
        structs = [describe_layer(reads(layers, name), reads) for name in layers._modules]
        self._structs: list[LayerStruct] = structs
        self._pointers = (ctypes.c_void_p * len(structs))(*map(ctypes.addressof, structs))
        self._rotary = layers[0].self_attn.rotary if structs else None
        self._run, self._reads = load().encoder_layers, reads  # which owns the weights

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the last layer (T x B x C), if each layer reads the one below.

        Args:
            x: T x B x C
            bias: the :func:`padding_bias` of *x*, or None
        """
        return self._layers(x, self._source(x, bias), 0, len(self._structs))

    def layers(self, x: Tensor, bias: Tensor | None) -> list[LayerCall]:
        """Return each layer as a function for inputs with the shape and the *bias* of *x*."""
        source = self._source(x, bias)
        return [lambda x, *_, first=first: (self._layers(x, source, first, 1), None)
                for first in range(len(self._structs))]  # fmt: skip

    def _source(self, x: Tensor, bias: Tensor | None) -> tuple[SourceStruct, list[Tensor]]:
        """Return the structure of a batch, and the tensors that own its memory."""
        source, kept = SourceStruct(x.size(1), x.size(0), torch.get_num_threads()), []
        if bias is not None:
            kept.append(bias.float().contiguous())
            source.bias, source.bias_stride = kept[0].data_ptr(), kept[0].stride(0)
        if self._rotary is not None:
            kept += self._rotary.at(0, x.size(0))
            source.cos, source.sin = kept[-2].data_ptr(), kept[-1].data_ptr()
        return source, kept

    def _layers(self, x: Tensor, source: tuple[SourceStruct, list[Tensor]], first: int, count: int) -> Tensor:
        x = x.contiguous()
        y, layers = torch.empty_like(x), ctypes.byref(self._pointers, first * ctypes.sizeof(ctypes.c_void_p))
        self._run(layers, ctypes.c_int64(count), ctypes.byref(source[0]), pointer(x), pointer(y))
        return y


_described = Described(NativeEncoder)


def find_encoder(encoder: nn.Module, x: Tensor, bias: Tensor | None) -> NativeEncoder | None:
    """Return the layers of *encoder* in kernels; None if they do not support one of them, or *x*."""
    if encoder.training or not encoder.layers or not runs_native(x) or (bias is not None and bias.dim() != 4):
        return None
    return _described(encoder)
