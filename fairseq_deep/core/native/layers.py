"""Descriptions of layers and attentions for the compiled kernels.

Gradients, attention weights, dropout and types other than fp32 use torch's operations.
"""

from __future__ import annotations

import ctypes

import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import UsageError
from .structures import AttentionStruct, LayerStruct, NormStruct, Reads, Unsupported

SUBLAYERS = ("self", "cross", "ffn")
ACTIVATIONS = {F.relu: 1, F.silu: 2}
EXTRAS = ("relative_keys", "q_norm", "gate", "output_norm", "value_residual")


def describe_attention(attention: nn.Module, reads: Reads) -> AttentionStruct:
    """Return the structure of a :class:`MultiheadAttention`, in evaluation mode.

    Raises:
        Unsupported: the kernels do not support it
    """
    if "kernels" not in type(attention).__dict__:  # a mean, a recurrence or another attention
        raise Unsupported
    dropout = reads(attention, "dropout_module")
    if reads(dropout, "p") > 0 and (reads(dropout, "training") or reads(dropout, "apply_during_inference")):
        raise Unsupported
    if any(reads(attention, name) is not None for name in EXTRAS):
        raise Unsupported
    inputs = reads.linear(attention, "q_proj" if attention.of_memory else "qkv_proj")
    heads = (attention.num_heads, attention.kv_heads, attention.head_dim)
    return AttentionStruct(inputs, reads.linear(attention, "out_proj"), *heads)


def describe_layer(layer: nn.Module, reads: Reads) -> LayerStruct:
    """Return the structure of a :class:`~fairseq_deep.core.layers.layer.Layer`, in evaluation mode.

    Raises:
        Unsupported: the kernels do not support it
    """
    if "kernels" not in type(layer).__dict__ or reads(layer, "training"):
        raise Unsupported
    if not {name for name, _ in layer.sublayers} <= {*SUBLAYERS}:
        raise Unsupported
    reads.run_whole(layer)
    if reads(reads(layer, "dropout_module"), "apply_during_inference"):
        raise Unsupported
    activation = reads(layer, "activation_fn")
    if activation not in ACTIVATIONS or reads(layer, "ffn_norm") is not None:
        raise Unsupported
    struct, source = LayerStruct(reads(layer, "normalize_before")), reads(layer, "encoder_attn")
    struct.self = describe_attention(reads(layer, "self_attn"), reads)
    norms = [reads.norm(layer, "self_attn_layer_norm"), NormStruct(), reads.norm(layer, "final_layer_norm")]
    if source is not None:
        struct.source, norms[1] = describe_attention(source, reads), reads.norm(layer, "encoder_attn_layer_norm")
        struct.source_keys, struct.source_values = (reads.linear(source, f"{name}_proj") for name in "kv")
    struct.norms = (NormStruct * 3)(*norms)
    struct.fc1, struct.fc2 = reads.linear(layer, "fc1"), reads.linear(layer, "fc2")
    struct.activation = ACTIVATIONS[activation]
    if reads(layer, "fc_linear") is not None:
        struct.gate = reads.linear(layer, "fc_linear")
    struct.scales = _scales(layer, reads)
    return struct


def _scales(layer: nn.Module, reads: Reads) -> ctypes.Array:
    """Return the factors of the branches; the kernels support constant numbers."""
    scales, residual = (ctypes.c_float * 3)(1.0, 1.0, 1.0), reads(layer, "residual")
    for name in (*residual.__dict__, *residual._parameters, *residual._buffers):
        reads(residual, name)
    if not residual.foldable:
        raise Unsupported
    for index, (name, _) in enumerate(layer.sublayers):
        try:
            before, after = residual.factors(index)
        except UsageError:  # not constant yet
            raise Unsupported from None
        if isinstance(before, Tensor) or isinstance(after, Tensor) or before != 1.0:
            raise Unsupported
        scales[SUBLAYERS.index(name)] = after
    return scales
