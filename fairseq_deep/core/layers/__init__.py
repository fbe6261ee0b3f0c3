"""Encoder and decoder layers, with fairseq's parameter names for compatible checkpoints."""

from fairseq_deep.core.attention import LayerContext

from .building import build_layer
from .layer_drop import LayerDrop
from .wrapping import wrap_layer

__all__ = ["LayerContext", "LayerDrop", "build_layer", "wrap_layer"]
