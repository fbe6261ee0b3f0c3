"""Adam for all tensors at once, without apex (``--optimizer fused_adam``).

Adam: A Method for Stochastic Optimization, Kingma and Ba, ICLR 2015; with the weight decay d of Decoupled Weight Decay
Regularization, Loshchilov and Hutter, ICLR 2019, and eps as in fairseq's ``--optimizer adam``:

    m <- b1 m + (1 - b1) g        c1 = 1 - b1^t
    v <- b2 v + (1 - b2) g^2      c2 = sqrt(1 - b2^t)
    w <- w - lr d w - lr c2 / c1 m / (sqrt(v) + eps)

torch's kernels add eps to sqrt(v) / c2, which is equivalent with eps / c2. A parameter may have its own factors on lr
and eps (:func:`set_factors`).
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import HALF

from .tensors import copy_all, in_fp32

CHUNK = 2**25
"""Number of elements updated at once; it limits the memory of intermediate results."""


PLAIN = (1.0, 1.0)


def set_factors(model: nn.Module) -> None:
    """Give the parameters of layers the factors on lr and eps that their residual connections require.

    The factors are stored as ``param_group``, which fairseq's unflattened fp32 copies keep.
    """
    for module in model.modules():
        factors = module.residual.adam_factors() if hasattr(module, "residual") else PLAIN
        for parameter in module.parameters() if factors != PLAIN else ():
            parameter.param_group = factors


def factors_of(parameter: Tensor) -> tuple[float, float]:
    """Return the factors of *parameter* on lr and eps."""
    factors = getattr(parameter, "param_group", None)
    return factors if isinstance(factors, tuple) else PLAIN


class FusedAdam(torch.optim.Optimizer):
    """fairseq's Adam in a few kernel launches, with the same state (``step``, ``exp_avg``, ``exp_avg_sq``).

    Weights in half precision (``--memory-efficient-fp16``) are updated in fp32 and rounded; their state is in fp32.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    supports_step_with_scale = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None, scale: float | Tensor = 1.0):
        """Divide all gradients by *scale* and update the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group(group, [weight for weight in group["params"] if weight.grad is not None], scale)
        return loss

    def _update_group(self, group: dict[str, Any], weights: list[Tensor], scale: float | Tensor) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for weight in weights:
            key = (weight.device, weight.dtype, self._count(weight, group), *factors_of(weight))
            alike.setdefault(key, []).append(weight)
        for (_, _, step, rate, eps), same in alike.items():
            settings = {**group, "lr": group["lr"] * rate, "eps": group["eps"] * eps}
            for chunk in chunks_of(same):
                self._update(chunk, settings, step, scale)

    def _count(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Return the step number of *weight*, and create its state if necessary."""
        if weight.grad.is_sparse:
            raise RuntimeError("sparse gradients are not supported with Adam")
        if weight.grad.stride() != weight.stride():  # torch's kernel reads both as flat memory
            weight.grad = torch.empty_like(weight).copy_(weight.grad)
        state, dtype = self.state[weight], torch.float32 if weight.dtype in HALF else weight.dtype
        if "exp_avg" not in state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(weight, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=dtype)
        for name in ("exp_avg", "exp_avg_sq"):  # a loaded state may be on another device
            state[name] = state[name].to(weight.device, dtype)
        state["step"] = int(state.get("step", group.get("step", 0))) + 1  # apex counts in the group
        return state["step"]

    def _update(self, weights: list[Tensor], group: dict[str, Any], step: int, scale: float | Tensor) -> None:
        exp_avgs = [self.state[weight]["exp_avg"] for weight in weights]
        exp_avg_sqs = [self.state[weight]["exp_avg_sq"] for weight in weights]
        with full_precision(weights, scale) as (targets, grads):
            _fused(targets, grads, exp_avgs, exp_avg_sqs, group, step, scale)


@contextlib.contextmanager
def full_precision(weights: list[Tensor], scale: float | Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield *weights* of one type and their gradients, which the caller updates in place and divides by *scale*.

    For half precision, it yields fp32 copies and copies them back at the end.
    """
    targets, grads = weights, [weight.grad for weight in weights]
    half = weights[0].dtype in HALF
    if half:
        targets, grads = in_fp32(weights), in_fp32(grads)
    yield targets, grads
    if half:
        copy_all(weights, targets)
        if is_scaled(scale):  # gradients must be divided after the step, as with fp32 weights
            copy_all([weight.grad for weight in weights], grads)


def is_scaled(scale: float | Tensor) -> bool:
    """Return whether dividing by *scale* may change a value, without host-device synchronisation."""
    return torch.is_tensor(scale) or scale != 1.0  # reading a tensor on a GPU would synchronise


def chunks_of(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield *weights* in lists of up to ``CHUNK`` elements; a larger tensor is its own list."""
    chunk: list[Tensor] = []
    size = 0
    for weight in weights:
        if chunk and size + weight.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(weight)
        size += weight.numel()
    yield chunk


def _fused(weights, grads, exp_avgs, exp_avg_sqs, group, step, scale) -> None:
    beta1, beta2 = group["betas"]
    number = functools.partial(torch.full, (), dtype=torch.float32, device=weights[0].device)
    divisor = None
    if is_scaled(scale):
        divisor = scale.to(weights[0].device, torch.float32) if torch.is_tensor(scale) else number(float(scale))
    torch._fused_adamw_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [number(float(step))] * len(weights),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"] / math.sqrt(1 - beta2**step),
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )
