"""The running mean and average attention: half precision, memory.

Their equations and gradients are in ``test_whole_models.py``, and common properties in ``test_decoder_attentions.py``.
"""

import pytest
import torch

from fairseq_deep.core.attention import RunningMean, SharedBeamState

T, B, C = 7, 3, 6


def test_a_row_of_padding_alone_is_finite():
    mask = torch.ones(B, T, dtype=torch.bool)
    x = torch.randn(T, B, C, requires_grad=True)
    mean = RunningMean()(x, mask)
    assert mean.eq(0).all()
    mean.sum().backward()
    assert x.grad.eq(0).all()


def run_steps(mean, x, words):
    """The means of all positions, one after the other; *words*: B x T, false where there is padding."""
    state, beams = {}, SharedBeamState(attends=False, averages=True)
    with torch.no_grad():
        for position in range(len(x)):
            now = x[position : position + 1]
            step = beams(state, now.size(1), now, words[:, position : position + 1])
            yield mean(now, incremental_state=state, step=step)
    assert state[mean._state]["vector"].dtype == torch.promote_types(x.dtype, torch.float32)


def order_number(x):
    """The place of each fp16 or bf16 number among all of its type, so that neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1024, pytest.param(4096, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shift", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("steps", [False, True], ids=["full", "steps"])
def test_half_precision_is_exact_to_its_last_digit(dtype, length, shift, steps):
    """The fp64 mean, rounded: where that lies almost between two numbers, the other one may come out.

    With a shift of 60, the sums are beyond what fp16 can hold.
    """
    x, words = (torch.randn(length, 2, 64) + shift).to(dtype), torch.ones(2, length, dtype=torch.bool)
    words[0, :300], words[1, ::2] = False, False
    counted = words.T.double().unsqueeze(2)
    exact = (x.double() * counted).cumsum(0) / counted.cumsum(0).clamp(min=1)
    mean = RunningMean()
    actual = torch.cat(list(run_steps(mean, x, words))) if steps else mean(x, ~words)
    assert actual.dtype == dtype
    distance = (order_number(actual) - order_number(exact.to(dtype))).abs()
    assert distance.max() <= 1 and distance.float().mean() < 1e-3
