"""Activation recomputation around a finished layer (``--checkpoint-activations``, ``--offload-activations``)."""

from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """*layer*, recomputing its activations in the backward pass if *cfg* asks for it.

    Aggregators are applied outside of the wrapped layer, so that what they keep is computed once.
    """
    if cfg.checkpoint_activations:
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return layer
