"""Attentions of decoders in compiled kernels, in decoding steps whose layers torch runs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from .layers import describe_attention
from .library import load
from .packed import pointer, runs_native
from .structures import Described, KeysStruct, Reads, StepStruct, Unsupported


class NativeAttention:
    """Decoder attention in compiled kernels.

    Args:
        attention: the attention to the target or to the source
        reads: notes the attributes that the kernels depend on

    Raises:
        Unsupported: the kernels do not support it
    """

    def __init__(self, attention: nn.Module, reads: Reads):
        self._run, self._struct = load().attention_step, describe_attention(attention, reads)
        self._attention, self._reads = attention, reads  # which owns the weights
        self._of_memory = ctypes.c_int64(attention.of_memory)
        # reading attributes of modules in each step would be slow
        self._cache = attention.memory_cache if attention.of_memory else attention.own_cache
        self._heads, self._rotary = (attention.kv_heads, attention.head_dim), attention.rotary

    def __call__(self, x: Tensor, context: Any, added: Tensor | None = None) -> Tensor:
        """Run the attention in a decoding step; see ``MultiheadAttention.forward``."""
        x, step = x.contiguous(), context.native.struct
        y = torch.empty_like(x)
        keys = self._memory(x, context) if self._of_memory.value else self._target(x, context)
        added = None if added is None else added.contiguous()
        structs = ctypes.byref(self._struct), self._of_memory, ctypes.byref(step), ctypes.byref(keys)
        self._run(*structs, pointer(x), None if added is None else pointer(added), pointer(y))
        return y

    def _target(self, x: Tensor, context: Any) -> KeysStruct:
        """Return the keys of the target, with room for new ones."""
        step, (heads, dim) = context.native.struct, self._heads
        buffer = self._cache.extend(context.cache, x, (2, step.sentences, heads, step.beam, dim))
        if self._rotary is not None:
            context.native.rotate(self._rotary)
        return KeysStruct(buffer.data_ptr(), buffer.stride(0), buffer.size(3))

    def _memory(self, x: Tensor, context: Any) -> KeysStruct:
        """Return the keys of the source, which the first step computes."""
        saved = self._cache.saved(context.cache)
        if saved is None:
            self._attention.read_memory(x, context)
            saved = self._cache.saved(context.cache)
        key, value, bias = saved["key"], saved["value"], saved["bias"]
        keys = KeysStruct(None, 0, 0, key.data_ptr(), value.data_ptr(), None, value.size(0), value.size(2))
        if bias is not None:
            keys.source_bias, keys.bias_stride = bias.data_ptr(), bias.stride(0)
        return keys


class NativeStep:
    """Decoding step with attentions in compiled kernels.

    Args:
        parts: the supported attentions
        seen: hypotheses x T, the slots of the target's keys that each sees
        step: a ``DecodingStep``
    """

    def __init__(self, parts: dict[nn.Module, NativeAttention], seen: Tensor, step: Any):
        self.parts, self._seen, self._rotation = parts, seen, None
        sentences, beam = (seen.size(0), 1) if step.mask is None else (step.mask.size(0), step.mask.size(2))
        length, threads = seen.size(1), torch.get_num_threads()
        self.struct = StepStruct(sentences, beam, length, threads, max(length - 1, 0) * beam, seen.data_ptr(), length)

    def rotate(self, rotary: nn.Module) -> None:
        """Set the rotations of this position; all attentions of a decoder have the same."""
        if self._rotation is None:
            self._rotation = rotary.at(self.struct.length - 1)  # keeps its table, which another thread may replace
            self.struct.cos, self.struct.sin = (each.data_ptr() for each in self._rotation)


def _supported(layers: nn.ModuleList, reads: Reads) -> dict[nn.Module, NativeAttention]:
    """Return the attentions of *layers* that the kernels support."""
    found = {}
    for part in layers.modules():
        # subclasses do not inherit the attribute
        if type(part).__dict__.get("kernels") is NativeAttention:
            try:
                found[part] = NativeAttention(part, reads)
            except Unsupported:
                continue
    return found


_described = Described(_supported)


def begin_step(layers: nn.ModuleList, x: Tensor, step: Any) -> NativeStep | None:
    """Return the step of the *layers* of a decoder; None if torch's operations run all attentions.

    Args:
        x: 1 x B x C, the input of the first layer
        step: a ``DecodingStep``
    """
    if step.place is not None or not runs_native(x):
        return None
    parts, rows, mask = _described(layers), x.size(1), step.mask
    if not parts:
        return None
    if mask is None:  # no layer has self-attention
        return NativeStep(parts, torch.empty(rows, 0, dtype=torch.int32), step)
    slots, length = mask.size(3), mask.size(3) // mask.size(2)
    whole = mask.size(0) == 1 or mask.stride(0) == mask.size(2) * mask.stride(2)
    if mask.dtype != torch.float32 or mask.stride(3) != 1 or not whole:
        return None
    seen = torch.empty(rows, length, dtype=torch.int32)
    sizes = map(ctypes.c_int64, (rows, mask.stride(2), slots, length))
    if load().seen_slots(pointer(mask), *sizes, pointer(seen)) != length:
        return None  # some hypotheses have padding
    return NativeStep(parts, seen, step)
