"""Muon for the matrices of hidden layers, and Adam for all other parameters (``--optimizer muon``).

Muon: An optimizer for hidden layers in neural networks, Jordan et al., 2024; the scale ``match_rms_adamw`` of Muon is
Scalable for LLM Training, Liu et al., 2025 (arXiv 2502.16982). For a matrix w of r rows and c columns, its gradient g
and the momentum mu:

    B <- mu B + g
    X <- (g + mu B) / |g + mu B|                                 Frobenius norm
    X <- a X + (b A + c A^2) X,  A = X X^T                       ns_steps times; (a, b, c) = (3.4445, -4.775, 2.0315)
    w <- w - lr d w - lr s X
    s = 0.2 sqrt(max(r, c))  (match_rms_adamw)  or  sqrt(max(1, r / c))  (jordan)

The iteration moves every singular value of X to about 1. ``torch.optim.Muon`` has the same equations. It requires torch
2.9, does not divide gradients by a loss scale, and updates matrices one by one, in bf16. A test compares the two.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import HALF
from fairseq_deep.core.registry import UsageError

from .adam import FusedAdam, chunks_of, factors_of, full_precision, is_scaled

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALES = ("match_rms_adamw", "jordan")
MOMENTUM, NS_STEPS = 0.95, 5
SMALLEST = 1e-7
"""Minimum of the norm by which an update is divided."""

_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(?!.*\bresidual\.)")


def mark_matrices(model: nn.Module) -> None:
    """Mark the parameters that Muon updates, as ``hidden_matrix``; :func:`is_matrix` reads it.

    Marked parameters are the weights of linear layers in both stacks (attention, feed-forward), except in residual
    connections. Embeddings, the output projection, norms, biases, relative positions and aggregators are not marked.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _IN_LAYER.match(f"{name}.") and min(module.weight.shape) > 1:
            module.weight.hidden_matrix = True


def is_matrix(parameter: Tensor) -> bool:
    """Return whether Muon updates *parameter*."""
    return getattr(parameter, "hidden_matrix", False)


def keep_marks(copies: list[Tensor], parameters: list[Tensor]) -> None:
    """Mark *copies* in another precision like their *parameters*."""
    for copy, parameter in zip(copies, parameters):
        if is_matrix(parameter):
            copy.hidden_matrix = True


def check_options(momentum: float, ns_steps: int, scale: str) -> None:
    """Check the options of Muon.

    Raises:
        UsageError: one line that names the flag and the fix
    """
    if not 0 <= momentum < 1:
        raise UsageError(f"--muon-momentum must be in [0, 1), not {momentum}: use {MOMENTUM}, or omit it")
    if ns_steps < 1:
        raise UsageError(f"--muon-ns-steps must be at least 1, not {ns_steps}: use {NS_STEPS}, or omit it")
    if str(scale) not in SCALES:
        raise UsageError(f"unknown --muon-scale {scale}; choose from {', '.join(SCALES)}")


def scale_of(shape: torch.Size | tuple[int, int], scale: str) -> float:
    """Return the factor s on the update of a matrix with this *shape* (rows, columns)."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == SCALES[0] else math.sqrt(max(1, rows / columns))


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Move the singular values of each matrix to about 1.

    Args:
        matrices: (number, rows, columns); the computation uses its type
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


class Muon(FusedAdam):
    """Muon for marked parameters, with the state ``momentum_buffer``, and :class:`FusedAdam` for the others.

    Matrices of one shape are updated together.

    Raises:
        UsageError: an option is out of range
    """

    supports_flat_params = False

    def __init__(self, params, momentum=MOMENTUM, ns_steps=NS_STEPS, scale=SCALES[0], **adam: Any):
        check_options(momentum, ns_steps, scale)
        super().__init__(params, **adam)
        for settings in (self.defaults, *self.param_groups):
            settings.update(momentum=momentum, ns_steps=ns_steps, scale=scale)

    def _update_group(self, group: dict[str, Any], weights: list[Tensor], scale: float | Tensor) -> None:
        super()._update_group(group, [weight for weight in weights if not is_matrix(weight)], scale)
        alike: dict[Any, list[Tensor]] = {}
        for weight in weights:
            if is_matrix(weight):
                key = (weight.device, weight.dtype, weight.shape, factors_of(weight)[0])
                alike.setdefault(key, []).append(weight)
        for (*_, rate), same in alike.items():
            for chunk in chunks_of(same):
                self._update_matrices(chunk, {**group, "lr": group["lr"] * rate}, scale)

    def _momentum(self, weight: Tensor) -> Tensor:
        state, dtype = self.state[weight], torch.float32 if weight.dtype in HALF else weight.dtype
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, dtype=dtype)
        # a loaded state may be on another device
        state["momentum_buffer"] = state["momentum_buffer"].to(weight.device, dtype)
        return state["momentum_buffer"]

    def _update_matrices(self, weights: list[Tensor], group: dict[str, Any], scale: float | Tensor) -> None:
        """Update *weights* of one shape."""
        buffers, momentum = [self._momentum(weight) for weight in weights], group["momentum"]
        with full_precision(weights, scale) as (targets, grads):
            if is_scaled(scale):
                torch._foreach_mul_(grads, 1 / (scale.to(grads[0].device) if torch.is_tensor(scale) else scale))
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads)
            updates = torch.stack(torch._foreach_add(grads, buffers, alpha=momentum))
            updates = orthogonalise(updates.to(_product_type(targets[0])), group["ns_steps"]).to(targets[0].dtype)
            if group["weight_decay"] != 0:
                torch._foreach_mul_(targets, 1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * scale_of(weights[0].shape, group["scale"])
            torch._foreach_add_(targets, list(updates), alpha=-rate)


def _product_type(weight: Tensor) -> torch.dtype:
    """Return bf16 on GPUs that support it: products are much faster, and the iteration tolerates the rounding."""
    return torch.bfloat16 if weight.is_cuda and torch.cuda.is_bf16_supported() else weight.dtype
