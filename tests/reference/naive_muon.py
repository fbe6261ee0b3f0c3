"""Muon, entry by entry (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982), on lists of rows of numbers."""

import math


def product(left, right):
    """Rows of the product of two matrices."""
    return [[sum(row[k] * right[k][j] for k in range(len(right))) for j in range(len(right[0]))] for row in left]


def turned(matrix):
    """Rows of the transposed matrix."""
    return [list(column) for column in zip(*matrix)]


def weighted(*terms):
    """The sum of (factor, matrix)."""
    rows, columns = len(terms[0][1]), len(terms[0][1][0])
    return [[sum(factor * matrix[i][j] for factor, matrix in terms) for j in range(columns)] for i in range(rows)]


def orthogonalised(matrix, steps):
    """The quintic iteration from the matrix divided by its Frobenius norm, with A = X X^T whatever the shape."""
    norm = math.sqrt(sum(entry * entry for row in matrix for entry in row))
    x = weighted((1 / norm, matrix))
    for _ in range(steps):
        gram = product(x, turned(x))
        polynomial = weighted((-4.775, gram), (2.0315, product(gram, gram)))
        x = weighted((3.4445, x), (1.0, product(polynomial, x)))
    return x


def steps(weight, grads, *, lr, decay, momentum, ns_steps, scale):
    """*weight* after one update per gradient; *scale*: "match_rms_adamw" or "jordan"."""
    rows, columns = len(weight), len(weight[0])
    if scale == "jordan":
        factor = math.sqrt(rows / columns) if rows > columns else 1.0
    else:
        factor = 0.2 * math.sqrt(rows if rows > columns else columns)
    buffer = [[0.0] * columns for _ in range(rows)]
    for grad in grads:
        buffer = weighted((momentum, buffer), (1.0, grad))
        x = orthogonalised(weighted((1.0, grad), (momentum, buffer)), ns_steps)
        weight = weighted((1.0, weight), (-lr * decay, weight), (-lr * factor, x))
    return weight
