"""Activation recomputation around a finished layer (``--checkpoint-activations``, ``--offload-activations``)."""

import functools

from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn
from torch.utils.checkpoint import checkpoint


def wrap_layer(layer: nn.Module, cfg, calls: int = 1) -> nn.Module:
    """*layer*, recomputing its activations in the backward pass if *cfg* asks for it.

    Aggregators are applied outside of the wrapped layer, so that what they keep is computed once.

    Args:
        layer: a layer
        cfg: fairseq's ``TransformerConfig``
        calls: how often the layer is evaluated in a forward pass. More than once takes torch's form that is not
            re-entrant, since with fairseq's DDP would see the gradient of a parameter more than once; it does not
            offload.
    """
    if cfg.checkpoint_activations and calls > 1:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    elif cfg.checkpoint_activations:
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return layer
