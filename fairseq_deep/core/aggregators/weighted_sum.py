"""Sums x_s = sum_k w_sk h_k over a complete list of tensors, all in one product.

This is the product of ``running_sums.py``, with the same precision, for entries that do not depend on the sums.
Autograd stores references to the entries, which other layers hold anyway. The backward pass stacks them again and
computes the gradients with two products.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .running_sums import inner_products, product, split


def _stack(entries: list[Tensor]) -> Tensor:
    """Stack *entries* as rows of one matrix, 1 x K x M."""
    return torch.stack([entry.reshape(-1) for entry in entries]).unsqueeze(0)


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, *entries: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *entries)
        stacked = _stack(list(entries))  # in the widest type: under autocast, types can differ
        parts = split(weights.unsqueeze(0), stacked.dtype)
        rows = product(parts, stacked).view(*parts.shape[1:3], *entries[0].shape)
        sums = rows[:, 0] if rows.size(1) == 1 else rows[:, 0] + rows[:, 1]
        return sums.to(entries[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weights, *entries = ctx.saved_tensors
        grad_weights, grad_entries = None, [None] * len(entries)
        grad = grad.reshape(1, len(weights), -1)
        if ctx.needs_input_grad[0]:
            stacked = _stack(entries)
            grad_weights = inner_products(grad.to(stacked.dtype), stacked, weights.dtype)[0]
        if any(ctx.needs_input_grad[1:]):
            columns = weights.t().unsqueeze(0).unsqueeze(2).to(grad.dtype)
            rows = product(columns, grad)[0].unbind(0)
            grad_entries = [row.view(entry.shape).to(entry.dtype) for row, entry in zip(rows, entries)]
        return (grad_weights, *grad_entries)


def weighted_sums(weights: Tensor, entries: list[Tensor]) -> list[Tensor]:
    """Compute linear combinations of *entries*.

    Args:
        weights: S x K, in fp32 or fp64
        entries: K tensors of one shape, of the same or lower precision than the weights

    Returns:
        S tensors of that shape, in the entries' type
    """
    return list(_WeightedSums.apply(weights, *entries).unbind(0))
