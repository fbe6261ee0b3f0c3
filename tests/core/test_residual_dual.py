"""ResiDual: initial values, and r in fp32. Its equations are proven in ``test_aggregators.py``."""

import pytest
import torch
from torch import nn

from tests.helpers.aggregators import make, run

T, B, C, L = 5, 3, 7, 3


class Zero(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


def test_norms_start_as_the_identity():
    dual = make("residual-dual", L, C)
    for norm in (*dual.norms, dual.dual_norm):
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    assert not dual.matrices()


def test_r_does_not_overflow_in_fp16():
    dual = make("residual-dual", L, C).half()
    dual.norms = nn.ModuleList(Zero() for _ in range(2 * L))
    output = run(dual, torch.randn(T, B, C).half(), [lambda x: x + 6e4 * torch.eye(C)[0].half()] * (2 * L))
    assert output.dtype == torch.float16 and output.isfinite().all()
    peak = (C - 1) ** 0.5  # of LN where one feature towers above the others
    torch.testing.assert_close(output[..., 0], torch.full((T, B), peak).half(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_r_adds_up_in_fp32(dtype):
    outputs = torch.randn(2 * L + 1, T, B, C).to(dtype)
    dual = make("residual-dual", L, C).to(dtype)
    dual.norms = nn.ModuleList(nn.Identity() for _ in range(2 * L))
    state = dual.start(outputs[0])
    for index, output in enumerate(outputs[1:]):
        state = dual.write(state, index, output)
    assert state[0].dtype == dtype and state[1].dtype == torch.float32
    torch.testing.assert_close(state[1], outputs.float().sum(0))
