"""Activation recomputation around a finished layer (``--checkpoint-activations``, ``--offload-activations``)."""

import functools

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fairseq_deep.core.stack import Stack


def wrap_layer(layer: nn.Module, stack: Stack) -> nn.Module:
    """Let *layer* recompute its activations in the backward pass if *stack* asks for it.

    Aggregators act outside of the wrapped layer, so what they keep is computed once. Recomputation has the types and
    the dropout of the forward pass, also under autocast. With ``offload``, inputs wait in the CPU's memory.
    """
    if stack.recompute:
        layer.forward = functools.partial(_offloaded if stack.offload else _recomputed, layer.forward)
    return layer


def _recomputed(forward, *args, **kwargs):
    """torch's non-reentrant checkpoint: DDP sees a parameter's gradient once, however often a layer is used."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _offloaded(forward, *args, **kwargs):
    with save_on_cpu():
        return _recomputed(forward, *args, **kwargs)
