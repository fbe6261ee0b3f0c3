"""Decoding steps of decoder layers in compiled kernels, and the selection of supported layers.

Gradients, attention weights, dropout and types other than fp32 use torch's operations.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ..registry import UsageError
from .library import load
from .packed import pointer, runs_native
from .structures import (
    ACTIVATIONS,
    AttentionStruct,
    Kept,
    KeysStruct,
    LayerStruct,
    NormStruct,
    StepStruct,
    Unsupported,
    linear_struct,
    norm_struct,
)

SUBLAYERS = ("self", "cross", "ffn")
PARTS = "fairseq_deep.native_parts"
"""Key of the supported parts in incremental states."""


def _attention(attention: nn.Module, kept: Kept) -> AttentionStruct:
    if "kernels" not in type(attention).__dict__:  # a mean, a recurrence or another attention
        raise Unsupported
    extras = (attention.relative_keys, attention.q_norm, attention.gate, attention.output_norm)
    drops = attention.dropout > 0 and (attention.training or attention.retain_dropout)
    if drops or any(extra is not None for extra in extras):
        raise Unsupported
    reads = attention.q_proj if attention.of_memory else attention.qkv_proj
    heads = (attention.num_heads, attention.kv_heads, attention.head_dim)
    return AttentionStruct(linear_struct(reads, kept), linear_struct(attention.out_proj, kept), *heads)


class Keys:
    """Addresses of the keys and values of one part, during a search.

    Args:
        target: the attention to the target, or None
        source: the attention to the source, or None
    """

    def __init__(self, target: nn.Module | None, source: nn.Module | None):
        self._source, self.struct = source, KeysStruct()
        # reading attributes of modules in each step would be slow
        self._own = None if target is None else target.own_cache
        self._memory = None if source is None else source.memory_cache
        self._heads = None if target is None else (target.kv_heads, target.head_dim)
        self._rotary = None if target is None else target.rotary
        self._buffer: Tensor | None = None
        self._rotation: Tensor | None = None  # keeps its table, which another thread may replace
        self._saved: dict | None = None

    def update(self, x: Tensor, context: Any) -> KeysStruct:
        """Find keys and values for the step of *context*, and make room for new ones."""
        if self._own is not None:
            native, (heads, dim) = context.native, self._heads
            size = (2, native.sentences, heads, native.beam, dim)
            buffer, self.struct.past = self._own.extend(context.cache, x, size)
            if buffer is not self._buffer:
                self._buffer, self.struct.target, self.struct.capacity = buffer, buffer.data_ptr(), buffer.size(3)
                self.struct.to_values = buffer.stride(0)
            if self._rotary is not None:
                self._rotation = self._rotary.at(self.struct.past // native.beam)
                self.struct.cos = self._rotation.data_ptr()
                self.struct.sin = self._rotation[1].data_ptr()
        if self._memory is not None:
            saved = self._memory.saved(context.cache)
            if saved is None:
                self._source.keep_memory(x, context.memory, context.memory_padding, context.cache)
                saved = self._memory.saved(context.cache)
            if saved is not self._saved:  # reordering sources replaces it
                self._saved = saved
                self._read(saved["key"], saved["value"], saved["bias"])
        return self.struct

    def _read(self, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
        keys = self.struct
        keys.source_keys, keys.source_values = key.data_ptr(), value.data_ptr()
        keys.sources, keys.source_length = value.size(0), value.size(2)
        keys.source_bias = None if bias is None else bias.data_ptr()
        keys.bias_stride = 0 if bias is None else bias.stride(0)


class NativeAttention:
    """Decoder attention in compiled kernels.

    Args:
        attention: the attention to the target or to the source

    Raises:
        Unsupported: the kernels do not support it
    """

    def __init__(self, attention: nn.Module):
        self._kept: Kept = []
        self._run, self.struct = load().attention_step, _attention(attention, self._kept)
        self._of_memory = ctypes.c_int64(attention.of_memory)
        self.keys = Keys(None, attention) if attention.of_memory else Keys(attention, None)

    def __call__(self, x: Tensor, context: Any, added: Tensor | None = None) -> Tensor:
        """Run the attention in a decoding step; see ``MultiheadAttention.forward``."""
        x = x.contiguous()
        y, keys = torch.empty_like(x), self.keys.update(x, context)
        added = None if added is None else added.contiguous()
        structs = ctypes.byref(self.struct), self._of_memory, ctypes.byref(context.native.struct), ctypes.byref(keys)
        self._run(*structs, pointer(x), None if added is None else pointer(added), pointer(y))
        return y


class NativeLayer:
    """``DecoderLayer`` in compiled kernels.

    Args:
        layer: the layer, in evaluation mode

    Raises:
        Unsupported: the kernels do not support it
    """

    def __init__(self, layer: nn.Module):
        self._kept: Kept = []
        self._run, self.struct = load().layer_step, describe_layer(layer, self._kept)
        self.keys = Keys(layer.self_attn, layer.encoder_attn)

    def __call__(self, x: Tensor, context: Any) -> Tensor:
        """Run the layer in a decoding step; x and the result are 1 x B x C."""
        x = x.contiguous()
        y, keys = torch.empty_like(x), self.keys.update(x, context)
        structs = ctypes.byref(self.struct), ctypes.byref(context.native.struct), ctypes.byref(keys)
        self._run(*structs, pointer(x), pointer(y))
        return y


class NativeStack:
    """All layers of a decoder in one call of the kernels; each reads the output of the layer below.

    Args:
        layers: the layers, from the lowest to the highest
    """

    def __init__(self, layers: list[NativeLayer]):
        self._run, self._layers, self._count = load().stack_step, layers, ctypes.c_int64(len(layers))
        addresses = ctypes.c_void_p * len(layers)
        self._structs = addresses(*(ctypes.addressof(layer.struct) for layer in layers))
        self._keys = addresses(*(ctypes.addressof(layer.keys.struct) for layer in layers))

    def __call__(self, x: Tensor, context: Any) -> tuple[Tensor, ...]:
        """Return the outputs of all layers (1 x B x C each) for the input *x* of the lowest."""
        for layer in self._layers:
            layer.keys.update(x, context)
        x, y = x.contiguous(), torch.empty(len(self._layers), *x.shape)
        self._run(self._structs, self._keys, self._count, ctypes.byref(context.native.struct), pointer(x), pointer(y))
        return y.unbind(0)


def describe_layer(layer: nn.Module, kept: Kept) -> LayerStruct:
    """Return the structure of *layer* for the kernels, with the addresses of its weights; their owners go to *kept*.

    Raises:
        Unsupported: the kernels do not support it
    """
    if layer.training or layer.dropout_module.apply_during_inference:
        raise Unsupported
    if layer.activation_fn not in ACTIVATIONS or layer.ffn_norm is not None:
        raise Unsupported
    struct, source = LayerStruct(layer.normalize_before), getattr(layer, "encoder_attn", None)
    struct.self = _attention(layer.self_attn, kept)
    if source is not None:
        struct.source = _attention(source, kept)
    of_source = nn.Identity() if source is None else layer.encoder_attn_layer_norm
    norms = (layer.self_attn_layer_norm, of_source, layer.final_layer_norm)
    struct.norms = (NormStruct * 3)(*(norm_struct(norm, kept) for norm in norms))
    struct.fc1, struct.fc2 = linear_struct(layer.fc1, kept), linear_struct(layer.fc2, kept)
    struct.activation = ACTIVATIONS[layer.activation_fn]
    if layer.fc_linear is not None:
        struct.gate = linear_struct(layer.fc_linear, kept)
    struct.scales = _scales(layer)
    return struct


def _scales(layer: nn.Module) -> ctypes.Array:
    """Return the factors of the branches; the kernels support constant numbers."""
    scales = (ctypes.c_float * 3)(1.0, 1.0, 1.0)
    if not layer.residual.foldable:
        raise Unsupported
    for index, (name, _) in enumerate(layer.sublayers):
        try:
            before, after = layer.residual.factors(index)
        except UsageError:  # not constant yet
            raise Unsupported from None
        if isinstance(before, Tensor) or isinstance(after, Tensor) or before != 1.0:
            raise Unsupported
        scales[SUBLAYERS.index(name)] = after
    return scales


class NativeStep:
    """Decoding step in compiled kernels.

    Attributes:
        parts: the supported layers and attentions
        stack: all layers; None if the kernels do not support one of them
    """

    def __init__(self, seen: Tensor, step: Any, parts: dict[nn.Module, Any], stack: NativeStack | None):
        self.parts, self.stack, self._seen = parts, stack, seen
        self.sentences, self.beam = (seen.size(0), 1) if step.mask is None else (step.mask.size(0), step.mask.size(2))
        threads, finite = torch.get_num_threads(), not step.caller_checks_nan
        self.struct = StepStruct(self.sentences, self.beam, seen.size(1), threads, finite, seen.data_ptr())


def begin_step(layers: nn.ModuleList, cache: dict, x: Tensor, step: Any) -> NativeStep | None:
    """Return the step of the *layers* of a decoder; None if torch's operations run all layers.

    Args:
        cache: the state of incremental decoding, which also stores the supported parts
        x: 1 x B x C, the input of the first layer
        step: a ``DecodingStep``
    """
    if step.place is not None or not runs_native(x):
        return None
    if PARTS not in cache:
        cache[PARTS] = _supported(layers)
    if not cache[PARTS]["parts"]:
        return None
    rows, mask = x.size(1), step.mask
    if mask is None:  # no layer has self-attention
        return NativeStep(torch.empty(rows, 0, dtype=torch.int32), step, **cache[PARTS])
    slots, length = mask.size(3), mask.size(3) // mask.size(2)
    whole = mask.size(0) == 1 or mask.stride(0) == mask.size(2) * mask.stride(2)
    if mask.dtype != torch.float32 or mask.stride(3) != 1 or not whole:
        return None
    seen = torch.empty(rows, length, dtype=torch.int32)
    sizes = map(ctypes.c_int64, (rows, mask.stride(2), slots, length))
    if load().seen_slots(pointer(mask), *sizes, pointer(seen)) != length:
        return None  # some hypotheses have padding
    return NativeStep(seen, step, **cache[PARTS])


def _supported(layers: nn.ModuleList) -> dict[str, Any]:
    """Return the layers that the kernels support, the supported attentions of other layers, and all layers as one.

    The attribute ``kernels`` of a class is its implementation. Subclasses do not inherit it.
    """
    found: dict[nn.Module, NativeLayer | NativeAttention] = {}
    for layer in layers:
        for part in layer.modules():
            kernels = type(part).__dict__.get("kernels")
            if kernels is not None:
                try:
                    found[part] = kernels(part)
                except Unsupported:
                    continue
                if part is layer:
                    break
    whole = [found.get(layer) for layer in layers if not layer._forward_hooks and not layer._forward_pre_hooks]
    native = [part for part in whole if isinstance(part, NativeLayer)]
    return {"parts": found, "stack": NativeStack(native) if len(native) == len(layers) else None}
