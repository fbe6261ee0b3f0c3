"""Decoder layers by the kernels: which are supported, and how they run a step.

A step uses torch's operations where it needs what the kernels lack: gradients, attention weights, dropout, other types
than fp32.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..attention.masks import is_sync_free
from ..compat import autocasts
from ..norms import RmsNorm
from .library import load
from .packed import LinearStruct, pointer

if TYPE_CHECKING:
    from ..attention import DecodingStep, MultiheadAttention
    from ..layers import DecoderContext, DecoderLayer

NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2
LAYERS = "fairseq_deep.native_layers"
"""A key of incremental states."""


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


class Unsupported(Exception):
    """A layer that the kernels lack something of."""


def _norm(norm: nn.Module) -> NormStruct:
    if type(norm) is nn.Identity:
        return NormStruct(NO_NORM)
    if type(norm) is RmsNorm:
        return NormStruct(RMS_NORM, norm.weight.data_ptr(), None, norm.eps)
    if type(norm) is nn.LayerNorm and norm.bias is not None:
        return NormStruct(LAYER_NORM, norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
    raise Unsupported


def _linear(linear: nn.Module) -> LinearStruct:
    native = getattr(linear, "native", None)
    if native is None:
        raise Unsupported
    struct = LinearStruct.from_buffer_copy(native.struct)
    struct.bias = None if linear.bias is None else linear.bias.data_ptr()
    return struct


def _attention(attention: MultiheadAttention) -> AttentionStruct:
    extras = (attention.relative_keys, attention.rotary, attention.q_norm, attention.gate, attention.output_norm)
    if any(extra is not None for extra in extras) or (attention.retain_dropout and attention.dropout > 0):
        raise Unsupported
    reads = attention.q_proj if attention.of_memory else attention.qkv_proj
    heads = (attention.num_heads, attention.kv_heads, attention.head_dim)
    return AttentionStruct(_linear(reads), _linear(attention.out_proj), *heads)


class NativeLayer:
    """A :class:`DecoderLayer` by the kernels.

    Args:
        layer: the layer, in evaluation mode

    Raises:
        Unsupported: the kernels lack something of it
    """

    def __init__(self, layer: DecoderLayer):
        self.layer, self._run = layer, load().layer_step
        self.struct = describe_layer(layer)

    def __call__(self, x: Tensor, context: DecoderContext, step: StepStruct) -> Tensor:
        """Run a step: x and the result are 1 x B x C."""
        y, keys = torch.empty_like(x), KeysStruct()
        own = self.layer.self_attn.own_cache
        size = (2, step.sentences, self.struct.self.kv_heads, step.beam, self.struct.self.dim)
        buffer, keys.past = own.extend(context.cache, x, size)
        keys.target, keys.to_values, keys.capacity = buffer.data_ptr(), buffer.stride(0), buffer.size(3)
        if self.struct.source.heads:
            saved = self._source(x, context)
            key, value, bias = saved
            keys.source_keys, keys.source_values = key.data_ptr(), value.data_ptr()
            keys.sources, keys.source_length = value.size(0), value.size(2)
            if bias is not None:
                keys.source_bias, keys.bias_stride = bias.data_ptr(), bias.stride(0)
        self._run(ctypes.byref(self.struct), ctypes.byref(step), ctypes.byref(keys), pointer(x), pointer(y))
        return y

    def _source(self, x: Tensor, context: DecoderContext) -> tuple[Tensor, Tensor, Tensor | None]:
        attention = self.layer.encoder_attn
        saved = attention.memory_cache(context.cache)
        if saved is None:
            attention._of_memory(x, context.memory, context.memory_padding, context.cache)
            saved = attention.memory_cache(context.cache)
        return saved


def describe_layer(layer: DecoderLayer) -> LayerStruct:
    """The structure of *layer* for the kernels, with the addresses of its weights.

    Raises:
        Unsupported: they lack something of it
    """
    from ..layers import DecoderLayer  # which imports this module
    from ..residuals.plain import Plain

    drops = layer.training or layer.dropout_module.apply_during_inference
    if type(layer) is not DecoderLayer or type(layer.residual) is not Plain or drops:
        raise Unsupported
    if not layer.relu or layer.fc_linear is not None or layer.ffn_norm is not None:
        raise Unsupported
    struct = LayerStruct(layer.normalize_before)
    source = layer.encoder_attn
    for attention in (layer.self_attn, source):
        if attention is not None and type(attention).__name__ != "MultiheadAttention":
            raise Unsupported
    struct.self = _attention(layer.self_attn)
    if source is not None:
        struct.source = _attention(source)
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm or nn.Identity(), layer.final_layer_norm)
    struct.norms = (NormStruct * 3)(*map(_norm, norms))
    struct.fc1, struct.fc2 = _linear(layer.fc1), _linear(layer.fc2)
    return struct


class NativeStep:
    """A decoding step by the kernels.

    Attributes:
        layers: the layers that they support
    """

    def __init__(self, layers: dict[nn.Module, NativeLayer], seen: Tensor, step: DecodingStep):
        self.layers, self._seen = layers, seen
        sentences, _, beam, _ = step.mask.shape
        threads, finite = torch.get_num_threads(), not step.caller_checks_nan
        self.struct = StepStruct(sentences, beam, seen.size(1), threads, finite, seen.data_ptr())


def begin_step(layers: nn.ModuleList, cache: dict, x: Tensor, step: DecodingStep) -> NativeStep | None:
    """What the *layers* of a decoder share in a step; None where torch's operations run all of them.

    Args:
        cache: the state of incremental decoding, where the supported layers are kept: weights stay during a search
        x: 1 x B x C, the input of the first layer
    """
    mask, library = step.mask, load()
    suited = mask is not None and step.place is None and x.dtype == torch.float32 and is_sync_free(x)
    if library is None or not suited or torch.is_grad_enabled() or autocasts():
        return None
    if LAYERS not in cache:
        cache[LAYERS] = _supported(layers)
    if not cache[LAYERS]:
        return None
    sentences, beam, slots = mask.size(0), mask.size(2), mask.size(3)
    seen = torch.empty(sentences * beam, slots // beam, dtype=torch.int32)
    sizes = map(ctypes.c_int64, (sentences * beam, mask.stride(2), slots, slots // beam))
    if library.seen_slots(pointer(mask), *sizes, pointer(seen)) != slots // beam:
        return None  # some hypotheses have padding
    return NativeStep(cache[LAYERS], seen, step)


def _supported(layers: nn.ModuleList) -> dict[nn.Module, NativeLayer]:
    found = {}
    for layer in layers:
        try:
            found[layer] = NativeLayer(layer)
        except Unsupported:
            continue
    return found
