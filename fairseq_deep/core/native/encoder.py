"""Encoder layers in compiled kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from .library import load
from .packed import pointer, runs_native
from .steps import describe_layer
from .structures import Built, Kept, SourceStruct

_built = Built()


class NativeEncoderLayer:
    """``EncoderLayer`` in compiled kernels.

    Args:
        layer: the layer, in evaluation mode

    Raises:
        Unsupported: the kernels do not support it
    """

    def __init__(self, layer: nn.Module):
        self._kept: Kept = []
        self._run, self._struct = load().encoder_layer, describe_layer(layer, self._kept)
        self._rotary = layer.self_attn.rotary

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output (T x B x C); *bias*: the :func:`padding_bias` of *x*, or None."""
        x = x.contiguous()
        y, source = torch.empty_like(x), SourceStruct(x.size(1), x.size(0), torch.get_num_threads())
        if bias is not None:
            bias = bias.float().contiguous()
            source.bias, source.bias_stride = bias.data_ptr(), bias.stride(0)
        if self._rotary is not None:
            cos, sin = self._rotary.at(0, x.size(0))
            source.cos, source.sin = cos.data_ptr(), sin.data_ptr()
        self._run(ctypes.byref(self._struct), ctypes.byref(source), pointer(x), pointer(y))
        return y


def find_encoder_layer(layer: nn.Module, x: Tensor) -> NativeEncoderLayer | None:
    """Return *layer* in kernels; None if they do not support it, or *x*.

    It is kept with the layer, and rebuilt if weights are packed again, or if parts of the layer or settings change.
    """
    kernels = type(layer).__dict__.get("kernels")  # subclasses do not inherit it
    if kernels is None or getattr(layer.fc2, "native", None) is None or layer.training or not runs_native(x):
        return None
    attention, norms = layer.self_attn, (layer.self_attn_layer_norm, layer.final_layer_norm)
    linears = (layer.fc1, layer.fc_linear, layer.fc2, attention.qkv_proj, attention.out_proj)
    settings = [getattr(linear, name, None) for linear in linears for name in ("native", "bias")]
    settings += [getattr(norm, name, None) for norm in norms for name in ("weight", "bias")]
    settings += [layer.residual, layer.activation_fn, layer.ffn_norm]
    settings += [layer.dropout_module.apply_during_inference, attention.retain_dropout]
    return _built.get(layer, settings, lambda: kernels(layer))
