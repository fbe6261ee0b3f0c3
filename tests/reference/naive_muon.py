"""Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982) of a matrix, given as rows of numbers."""

import math

import torch


def orthogonalised(matrix, steps):
    """The quintic iteration from the matrix divided by its Frobenius norm, with A = X X^T whatever the shape."""
    x = matrix / (matrix**2).sum().sqrt()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def steps(weight, grads, *, lr, decay, momentum, ns_steps, scale):
    """*weight* after one update per gradient; *scale*: "match_rms_adamw" or "jordan"."""
    weight, *grads = (torch.tensor(rows, dtype=torch.float64) for rows in (weight, *grads))
    rows, columns = weight.shape
    factor = math.sqrt(max(1, rows / columns)) if scale == "jordan" else 0.2 * math.sqrt(max(rows, columns))
    buffer = torch.zeros_like(weight)
    for grad in grads:
        buffer = momentum * buffer + grad
        weight = (1 - lr * decay) * weight - lr * factor * orthogonalised(grad + momentum * buffer, ns_steps)
    return weight.tolist()
