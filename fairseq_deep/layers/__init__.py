"""Encoder and decoder layers, with the names of fairseq's own so that their checkpoints are the same."""

from .attention_layers import AttentionDecoderLayer, AttentionEncoderLayer
from .decoder_layer import DecoderLayer
from .encoder_layer import EncoderLayer
from .wrapping import wrap_layer

__all__ = ["AttentionDecoderLayer", "AttentionEncoderLayer", "DecoderLayer", "EncoderLayer", "wrap_layer"]
