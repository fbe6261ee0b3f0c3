"""Activation recomputation for finished layers (``--checkpoint-activations``, ``--offload-activations``)."""

import functools

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fairseq_deep.core.stack import Stack


def wrap_layer(layer: nn.Module, stack: Stack) -> nn.Module:
    """Make *layer* recompute its activations in the backward pass if *stack* requires it.

    Aggregators act outside the wrapped layer, and their tensors are computed once. Recomputation has the types and the
    dropout of the forward pass, also under autocast. With ``offload``, inputs are stored in CPU memory until then.
    """
    if stack.recompute:
        layer.forward = functools.partial(_offloaded if stack.offload else _recomputed, layer.forward)
    return layer


def _recomputed(forward, *args, **kwargs):
    """Use torch's non-reentrant checkpoint: DDP sees a parameter's gradient once, even in repeated layers."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _offloaded(forward, *args, **kwargs):
    with save_on_cpu():
        return _recomputed(forward, *args, **kwargs)
