"""Encoder and decoder layers, with the names of fairseq's own so that their checkpoints are the same."""

from .attention_layers import AttentionDecoderLayer, AttentionEncoderLayer, ParallelAttentionDecoderLayer
from .decoder_layer import DecoderLayer, ParallelDecoderLayer
from .encoder_layer import EncoderLayer
from .target_attention import decoder_attention
from .wrapping import wrap_layer

__all__ = [
    "AttentionDecoderLayer",
    "AttentionEncoderLayer",
    "DecoderLayer",
    "EncoderLayer",
    "ParallelAttentionDecoderLayer",
    "ParallelDecoderLayer",
    "decoder_attention",
    "wrap_layer",
]
