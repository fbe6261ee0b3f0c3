"""Encoder and decoder layers, with the names of fairseq's own so that their checkpoints are the same."""

from .encoder_layer import EncoderLayer
from .wrapping import wrap_layer

__all__ = ["EncoderLayer", "wrap_layer"]
