"""Activation recomputation around a finished layer (``--checkpoint-activations``, ``--offload-activations``)."""

import functools
from types import SimpleNamespace

import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_deep.core.compat import autocast_state


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """*layer*, recomputing its activations in the backward pass if *cfg* asks for it.

    Aggregators are applied outside of the wrapped layer, so that what they keep is computed once. Recomputation runs in
    the types and with the dropout of the forward pass, also under ``--amp``.

    Args:
        layer: a layer
        cfg: fairseq's ``TransformerConfig``
    """
    if cfg.checkpoint_activations:
        form = _offloaded if cfg.offload_activations else _recomputed
        layer.forward = functools.partial(form, layer.forward)
    return layer


def _recomputed(forward, *args, **kwargs):
    """torch's form that is not re-entrant: DDP sees a parameter's gradient once, however often a layer is used."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _offloaded(forward, *args, **kwargs):
    """fairseq's form, which keeps the inputs on the CPU; by itself it recomputes without autocast."""
    context = autocast_state("cuda" if args[0].is_cuda else "cpu")

    def same_types(*args, **kwargs):
        with context():
            return forward(*args, **kwargs)

    return checkpoint_wrapper(SimpleNamespace(forward=same_types), offload_to_cpu=True).forward(*args, **kwargs)
