"""Gradient norm per layer, as in Figures 1 and 4 of Zhang et al., 2019."""

import math

import torch
from torch import nn

from .parts import part_parameters, tensor_norms


def layer_gradient_norms(model: nn.Module) -> dict[str, list[float]]:
    """Return the L2 norm over all parameter gradients of each part of *model*, after a backward pass.

    Returns:
        the norms of the parts of :func:`part_parameters`
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    values = torch.stack(tensor_norms(grads)).tolist() if grads else []
    norms = dict(zip(map(id, parameters), values))
    return {
        part: [math.hypot(*(norms.get(id(parameter), 0.0) for parameter in group)) for group in groups]
        for part, groups in part_parameters(model).items()
    }
