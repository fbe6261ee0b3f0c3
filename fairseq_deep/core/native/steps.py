"""Decoding steps of decoder layers in compiled kernels, and the selection of supported layers.

Gradients, attention weights, dropout and types other than fp32 use torch's operations.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from .library import load
from .packed import pointer, runs_native
from .structures import (
    AttentionStruct,
    KeysStruct,
    LayerStruct,
    NormStruct,
    StepStruct,
    Unsupported,
    linear_struct,
    norm_struct,
)

PARTS = "fairseq_deep.native_parts"
"""Key of the supported parts in incremental states."""


def _attention(attention: nn.Module) -> AttentionStruct:
    if "kernels" not in type(attention).__dict__:  # a mean, a recurrence or another attention
        raise Unsupported
    extras = (attention.relative_keys, attention.rotary, attention.q_norm, attention.gate, attention.output_norm)
    drops = attention.dropout > 0 and (attention.training or attention.retain_dropout)
    if drops or any(extra is not None for extra in extras):
        raise Unsupported
    reads = attention.q_proj if attention.of_memory else attention.qkv_proj
    heads = (attention.num_heads, attention.kv_heads, attention.head_dim)
    return AttentionStruct(linear_struct(reads), linear_struct(attention.out_proj), *heads)


class Keys:
    """Addresses of the keys and values of one part, during a search.

    Args:
        target: the attention to the target, or None
        source: the attention to the source, or None
    """

    def __init__(self, target: nn.Module | None, source: nn.Module | None):
        self.target, self.source, self.struct = target, source, KeysStruct()
        self._saved: dict | None = None

    def update(self, x: Tensor, context: Any) -> KeysStruct:
        """Find keys and values for the step of *context*, and make room for new ones."""
        if self.target is not None:
            step = context.native.struct
            size = (2, step.sentences, self.target.kv_heads, step.beam, self.target.head_dim)
            buffer, self.struct.past = self.target.own_cache.extend(context.cache, x, size)
            self.struct.target, self.struct.capacity = buffer.data_ptr(), buffer.size(3)
            self.struct.to_values = buffer.stride(0)
        if self.source is not None:
            saved = self.source.memory_cache.saved(context.cache)
            if saved is None:
                self.source.keep_memory(x, context.memory, context.memory_padding, context.cache)
                saved = self.source.memory_cache.saved(context.cache)
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
        self._run, self.struct = load().attention_step, _attention(attention)
        self._packed = packed_in(attention)
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
        self._run, self.struct = load().layer_step, describe_layer(layer)
        self._packed = packed_in(layer)
        self.keys = Keys(layer.self_attn, layer.encoder_attn)

    def __call__(self, x: Tensor, context: Any) -> Tensor:
        """Run the layer in a decoding step; x and the result are 1 x B x C."""
        x = x.contiguous()
        y, keys = torch.empty_like(x), self.keys.update(x, context)
        structs = ctypes.byref(self.struct), ctypes.byref(context.native.struct), ctypes.byref(keys)
        self._run(*structs, pointer(x), pointer(y))
        return y


def packed_in(part: nn.Module) -> list[Any]:
    """Return all weights of *part*, packed or not, to keep them alive: the structures only have their addresses."""
    packed = [module.native for module in part.modules() if getattr(module, "native", None) is not None]
    return packed + [parameter.data for parameter in part.parameters()]


def describe_layer(layer: nn.Module) -> LayerStruct:
    """Return the structure of *layer* for the kernels, with the addresses of its weights.

    Raises:
        Unsupported: the kernels do not support it
    """
    drops = layer.training or layer.dropout_module.apply_during_inference
    if type(layer.residual).__name__ != "Plain" or drops:
        raise Unsupported
    if not layer.relu or layer.fc_linear is not None or layer.ffn_norm is not None:
        raise Unsupported
    struct, source = LayerStruct(layer.normalize_before), layer.encoder_attn
    struct.self = _attention(layer.self_attn)
    if source is not None:
        struct.source = _attention(source)
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm or nn.Identity(), layer.final_layer_norm)
    struct.norms = (NormStruct * 3)(*map(norm_struct, norms))
    struct.fc1, struct.fc2 = linear_struct(layer.fc1), linear_struct(layer.fc2)
    return struct


class NativeStep:
    """Decoding step in compiled kernels.

    Attributes:
        parts: the supported layers and attentions
    """

    def __init__(self, parts: dict[nn.Module, NativeLayer | NativeAttention], seen: Tensor, step: Any):
        self.parts, self._seen = parts, seen
        sentences, beam = (seen.size(0), 1) if step.mask is None else (step.mask.size(0), step.mask.size(2))
        threads, finite = torch.get_num_threads(), not step.caller_checks_nan
        self.struct = StepStruct(sentences, beam, seen.size(1), threads, finite, seen.data_ptr())


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
    if not cache[PARTS]:
        return None
    rows, mask = x.size(1), step.mask
    if mask is None:  # no layer has self-attention
        return NativeStep(cache[PARTS], torch.empty(rows, 0, dtype=torch.int32), step)
    slots, length = mask.size(3), mask.size(3) // mask.size(2)
    whole = mask.size(0) == 1 or mask.stride(0) == mask.size(2) * mask.stride(2)
    if mask.dtype != torch.float32 or mask.stride(3) != 1 or not whole:
        return None
    seen = torch.empty(rows, length, dtype=torch.int32)
    sizes = map(ctypes.c_int64, (rows, mask.stride(2), slots, length))
    if load().seen_slots(pointer(mask), *sizes, pointer(seen)) != length:
        return None  # some hypotheses have padding
    return NativeStep(cache[PARTS], seen, step)


def _supported(layers: nn.ModuleList) -> dict[nn.Module, NativeLayer | NativeAttention]:
    """Return the layers that the kernels support, and the supported attentions of other layers.

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
    return found
