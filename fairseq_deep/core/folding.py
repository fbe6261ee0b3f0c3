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
def fold(model: nn.Module) -> set[str]:
    """Replace the residual connections of *model* by plain connections, and change its weights accordingly.

    Args:
        model: a :class:`~fairseq_deep.core.transformer.Transformer`; connections that are not *foldable* stay

    Returns:
        the names of the changed parameters

    Raises:
        UsageError: factors are not constant yet; the model is then unchanged
    """
    layers = [
        (f"{side}.layers.{index}", layer, getattr(model, side).stack)
        for side in ("encoder", "decoder")
        for index, layer in enumerate(getattr(model, side).layers)
        if layer.residual.foldable
    ]
    factors = [[layer.residual.factors(index) for index in range(len(layer.sublayers))] for _, layer, _ in layers]
    changed: set[str] = set()
    for (name, layer, stack), of_layer in zip(layers, factors):
        for (part, norm), (before, after) in zip(layer.sublayers, of_layer):
            changed |= _scale(layer, norm, before, name) | _scale(layer, ENDS[part], after, name)
        layer.residual = Plain(stack, 1)
    return changed


def _scale(layer: nn.Module, name: str, factor: float | Tensor, prefix: str) -> set[str]:
    """Scale the output of the module *name* of *layer*; return the names of the changed parameters."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return set()
    module = layer.get_submodule(name)
    for parameter in module.parameters():
        rows = factor.view(-1, *[1] * (parameter.dim() - 1)) if isinstance(factor, Tensor) else factor
        parameter.mul_(rows)
    return {f"{prefix}.{name}.{key}" for key, _ in module.named_parameters()}
