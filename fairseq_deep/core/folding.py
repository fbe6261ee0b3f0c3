"""Folds constant factors of residual connections into the weights; plain connections then compute the same.

A sub-layer F ends in a linear map, and in pre-norm it begins with a norm. In r = x + b F(a LN(x)), a is folded into the
weight and bias of the norm, and b into the weight and bias of the last map. In post-norm, r = x + b F(x).
"""

import torch
from torch import Tensor, nn

from .residuals.plain import Plain

ENDS = {"self": "self_attn.out_proj", "cross": "encoder_attn.out_proj", "ffn": "fc2"}
"""Last linear map of each sub-layer."""


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Replace the residual connections of *model* by plain connections, and change its weights accordingly.

    Args:
        model: a :class:`~fairseq_deep.core.transformer.Transformer`; connections that are not *foldable* stay

    Raises:
        UsageError: factors are not constant yet; the model is then unchanged
    """
    stacks = (model.encoder, model.decoder)
    layers = [(layer, stack.stack) for stack in stacks for layer in stack.layers if layer.residual.foldable]
    factors = [[layer.residual.factors(index) for index in range(len(layer.sublayers))] for layer, _ in layers]
    for (layer, stack), of_layer in zip(layers, factors):
        for (part, norm), (before, after) in zip(layer.sublayers, of_layer):
            _scale(layer.get_submodule(norm), before)
            _scale(layer.get_submodule(ENDS[part]), after)
        layer.residual = Plain(stack, 1)


def _scale(module: nn.Module, factor: float | Tensor) -> None:
    """Scale the output of a linear map or a norm."""
    for parameter in module.parameters():
        rows = factor.view(-1, *[1] * (parameter.dim() - 1)) if isinstance(factor, Tensor) else factor
        parameter.mul_(rows)
