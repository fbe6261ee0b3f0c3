"""Sums of a complete list of tensors in one product: values, every gradient, precision, kernels, memory."""

import pytest
import torch

from fairseq_deep.core.aggregators.weighted_sum import weighted_sums
from tests.helpers.tensors import DOUBLE, Kernels, assert_same, saved_bytes

T, B, C, S, K = 3, 2, 7, 4, 9


def leaves():
    entries = [torch.randn(T, B, C, **DOUBLE).requires_grad_() for _ in range(K)]
    return torch.randn(S, K, **DOUBLE).requires_grad_(), entries


def naive(weights, entries):
    return [sum(weight * entry for weight, entry in zip(row, entries)) for row in weights]


def test_sums_and_gradients_equal_the_equation():
    weights, entries = leaves()
    got, want = torch.stack(weighted_sums(weights, entries)), torch.stack(naive(weights, entries))
    assert_same(got, want, [weights, *entries])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Of a weight that half precision cannot hold, what is left counts, too; gradients of weights are in fp32."""
    weights = torch.tensor([[1 + 2**-13, -1.0], [0.5, 0.25]], requires_grad=True)
    entries = [torch.full((T, B, C), 200.0).to(dtype).requires_grad_() for _ in range(2)]
    first, second = weighted_sums(weights, entries)
    assert first.dtype == dtype and first.eq(200 * 2**-13).all() and second.eq(150).all()
    (100 * (first + second).float()).sum().backward()
    assert weights.grad.dtype == torch.float32 and weights.grad.eq(100 * 200 * T * B * C).all()
    assert entries[0].grad.dtype == dtype and entries[0].grad.eq(150).all()


def test_the_number_of_kernels_does_not_depend_on_the_number_of_sums():
    """Nor on that of entries; and autograd keeps no copies of these."""
    counts = set()
    for sums, size in ((1, 2), (6, 31)):
        weights = torch.randn(sums, size, requires_grad=True)
        entries = [torch.randn(T, B, C).requires_grad_() for _ in range(size)]
        kernels = Kernels()
        with kernels:
            found = weighted_sums(weights, entries)
        forward = len(kernels.names)
        with kernels:
            torch.autograd.grad(torch.stack(found), [weights, *entries], torch.randn(sums, T, B, C))
        counts.add((forward, len(kernels.names)))
        assert saved_bytes(lambda w=weights, e=entries: weighted_sums(w, e), [weights, *entries]) == 0
    assert len(counts) == 1 and max(counts)[0] <= 3 and max(counts)[1] <= 12
