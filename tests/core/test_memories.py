"""Decoder memories: precision, and the choice of layers.

Their equations are proven in ``test_whole_models.py``, beams in ``test_methods.py``, counts in ``test_counts.py``.
"""

import itertools

import pytest
import torch

from fairseq_deep.core.memories.layerwise import depth_aligned
from fairseq_deep.core.memories.transparent import Transparent
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import randomise
from tests.reference import naive_memories

T, B, C, L, M = 4, 2, 6, 6, 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_and_sums_of_half_precision_are_of_fp32(dtype):
    decoder = Stack(M, C, side="decoder", other_layers=L)
    memory = randomise(Transparent(Stack(L, C, other_layers=M), decoder, dropout=0.0))
    exact = memory.weight.detach().clone()
    memory.to(dtype)
    assert torch.equal(memory.weight, exact) and memory.weight.dtype == torch.float32
    outputs = [torch.randn(T, B, C).to(dtype).requires_grad_() for _ in range(L + 1)]
    actual = memory(outputs, [])
    expected = naive_memories.transparent([output.detach().double() for output in outputs], exact.double())
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    # 60,000 in an entry, and 48 entries: the gradient of a logit is beyond what fp16 can hold
    sum((z.float() * 6e4).sum() for z in actual).backward()
    assert memory.weight.grad.dtype == torch.float32 and memory.weight.grad.isfinite().all()
    assert outputs[0].grad.dtype == dtype
    memory.double().to(dtype)
    assert memory.weight.dtype == memory.weight.grad.dtype == torch.float32


def test_layerwise_takes_the_layer_of_the_same_depth():
    assert [depth_aligned(j, 6, 12) for j in range(1, 7)] == [2, 4, 6, 8, 10, 12]
    assert [depth_aligned(j, 2, 5) for j in range(1, 3)] == [3, 5], "half is rounded up"
    for depth, count in itertools.product(range(1, 14), repeat=2):
        aligned = [depth_aligned(j, count, depth) for j in range(1, count + 1)]
        assert aligned == [naive_memories.nearest_layer(j, count, depth) for j in range(1, count + 1)]
