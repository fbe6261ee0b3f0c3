"""x = sum_k w_k h_k over a list of tensors, in memory that does not grow with the number of sums.

A sum over ``torch.stack(entries)`` saves a copy of all entries for the backward pass, so a stack of L layers, which
sums at each layer, keeps (L+1)(L+2)/2 copies. Here autograd keeps references to the entries, which live anyway, and
the products are added one after the other, in fp32 for half-precision entries.
"""


import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _running_sum(weights: Tensor, entries: list[Tensor]) -> Tensor:
    """The sum over *entries* (each ... x C) with *weights* (entries x n, n divides C), in the entries' type."""
    first = entries[0]
    groups = weights.size(1)
    grouped = list(first.shape[:-1]) + [first.size(-1) // groups, groups]
    total = first.view(grouped) * weights[0]
    for k in range(1, len(entries)):
        total.addcmul_(entries[k].view(grouped), weights[k])
    return total.view(first.shape).to(first.dtype)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, *entries: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *entries)
        return _running_sum(weights, list(entries))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weights, *entries = ctx.saved_tensors
        groups = weights.size(1)
        grad = grad.to(weights.dtype).reshape(-1, groups)
        grad_weights = torch.empty_like(weights) if ctx.needs_input_grad[0] else None
        grad_entries = []
        for k, entry in enumerate(entries):
            if grad_weights is not None:
                product = entry.reshape(-1, groups).to(grad.dtype)
                grad_weights[k] = torch.dot(product.view(-1), grad.view(-1)) if groups == 1 else (product * grad).sum(0)
            if ctx.needs_input_grad[k + 1]:
                grad_entries.append((grad * weights[k]).view(entry.shape).to(entry.dtype))
            else:
                grad_entries.append(None)
        return (grad_weights, *grad_entries)


def weighted_sum(weights: Tensor, entries: list[Tensor]) -> Tensor:
    """Linear combination of *entries*.

    Args:
        weights: entries x n, in fp32 or fp64; feature i of an entry is multiplied with weight i mod n
        entries: tensors of one shape, ... x C; their type may be lower than that of the weights

    Returns:
        ... x C, in the entries' type
    """
    return _WeightedSum.apply(weights, *entries)
