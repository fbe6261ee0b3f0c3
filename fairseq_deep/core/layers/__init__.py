"""Encoder and decoder layers, with fairseq's parameter names for compatible checkpoints."""

from .building import build_layer
from .context import DecoderContext
from .decoder_layer import DecoderLayer, ParallelDecoderLayer
from .encoder_layer import EncoderLayer
from .layer_drop import LayerDrop
from .luna_layer import LunaEncoderLayer
from .non_residual import (
    AttentionDecoderLayer,
    AttentionEncoderLayer,
    DecoderFeedForward,
    EncoderFeedForward,
    ParallelAttentionDecoderLayer,
)
from .wrapping import wrap_layer

__all__ = [
    "AttentionDecoderLayer",
    "AttentionEncoderLayer",
    "DecoderContext",
    "DecoderFeedForward",
    "DecoderLayer",
    "EncoderFeedForward",
    "EncoderLayer",
    "LayerDrop",
    "LunaEncoderLayer",
    "ParallelAttentionDecoderLayer",
    "ParallelDecoderLayer",
    "build_layer",
    "wrap_layer",
]
