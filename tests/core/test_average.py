"""The running mean and average attention: the equations, padding, caches, half precision, memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_deep.core.attention import AverageAttention, RunningMean, SharedBeamState
from tests.helpers.models import reorder_all
from tests.helpers.tensors import DOUBLE, randomise, saved_bytes
from tests.reference import naive_average as naive

T, B, C, FFN = 7, 3, 6, 10
# padding of sentences 1 and 2, on the left, on the right, and in the middle
PADDING = {"none": ([], []), "left": ([0], [0, 1, 2]), "right": ([5, 6], [6]), "middle": ([2], [3, 4])}
every_padding = pytest.mark.parametrize("padding", PADDING)
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
with_and_without_ffn = pytest.mark.parametrize("ffn", [None, FFN], ids=["gate", "ffn"])


def padding_mask(kind):
    mask = torch.zeros(B, T, dtype=torch.bool)
    for sentence, columns in enumerate(PADDING[kind], start=1):
        mask[sentence, columns] = True
    return None if kind == "none" else mask


def words_of(mask):
    return torch.ones(B, T, dtype=torch.bool) if mask is None else ~mask


def naive_average(module, x, mask):
    parts = [part for linear in (module.fc1, module.fc2) if linear for part in (linear.weight, linear.bias)]
    return naive.average_attention(x, mask, (module.gate.weight, module.gate.bias), parts or None)


def assert_same(actual, expected, words, sources):
    """Where there are words, values and every gradient are equal."""
    actual, expected = actual.transpose(0, 1)[words], expected.transpose(0, 1)[words]
    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(actual)
    wanted = torch.autograd.grad(expected, sources, direction)
    for want, got in zip(wanted, torch.autograd.grad(actual, sources, direction)):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@every_padding
@both_ways
@with_and_without_ffn
def test_average_attention_equals_the_equations(padding, causal, ffn):
    module = randomise(AverageAttention(C, ffn).double())
    mask, x = padding_mask(padding), torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    words = words_of(mask)
    future = torch.zeros(T, T) if causal else None
    actual, weights = module(x, key_padding_mask=mask, attn_mask=future)
    assert weights is None
    expected = naive_average(module, x, naive.average_mask(words, causal))
    assert_same(actual, expected, words, [x, *module.parameters()])


@every_padding
def test_values_of_padding_count_nowhere(padding):
    module, mask, x = randomise(AverageAttention(C).double()), padding_mask(padding), torch.randn(T, B, C, **DOUBLE)
    words, other = words_of(mask).T, x.clone()
    other[~words] += 100.0
    before, after = (module(each, key_padding_mask=mask, causal=True)[0][words] for each in (x, other))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_row_of_padding_alone_is_finite():
    mask = torch.ones(B, T, dtype=torch.bool)
    x = torch.randn(T, B, C, requires_grad=True)
    mean = RunningMean()(x, mask)
    assert mean.eq(0).all()
    mean.sum().backward()
    assert x.grad.eq(0).all()


class Steps:
    """Runs *module* position by position, with what a decoder's attentions share."""

    def __init__(self, module, state):
        self.module, self.state, self.beam_state = module, state, SharedBeamState(attends=False, averages=True)

    def __call__(self, x, mask=None):
        """Of the position *x* (1 x B x C), which is padding where *mask* (B) is true."""
        words = torch.ones(x.size(1), 1, dtype=torch.bool) if mask is None else ~mask.unsqueeze(1)
        step = self.beam_state(self.state, x.size(1), x, words)
        output = self.module(x, incremental_state=self.state, step=step)
        return output[0] if isinstance(output, tuple) else output

    def reorder(self, order):
        reorder_all(nn.ModuleList([self.module, self.beam_state]), self.state, order)


@every_padding
@with_and_without_ffn
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_incremental_equals_full_in_a_scrambled_beam(padding, ffn, grad):
    """Which also grows, and shrinks as sentences end; states of others are left alone."""
    module, mask = randomise(AverageAttention(C, ffn).double()), ~words_of(padding_mask(padding))
    x, other = torch.randn(T, B, C, **DOUBLE), {"vector": torch.arange(3)}
    run = Steps(module, {"another": other})
    with torch.set_grad_enabled(grad):
        for position, order in enumerate([None, [2, 0, 0], None, [2, 1, 0, 0, 1], None, [3, 1, 2], [1]]):
            if order is not None:
                order = torch.tensor(order)
                run.reorder(order)
                x, mask = x[:, order], mask[order]
            full, _ = module(x, key_padding_mask=mask, attn_mask=torch.zeros(T, T))
            step, words = run(x[position : position + 1], mask[:, position]), ~mask[:, position]
            torch.testing.assert_close(step[0][words], full[position][words])
    assert run.state["another"] is other and torch.equal(other["vector"], torch.arange(3))


def test_nothing_is_reordered_before_the_first_step():
    state = {}
    Steps(RunningMean(), state).reorder(torch.tensor([0, 0]))
    assert state == {}


def order_number(x):
    """The place of each fp16 or bf16 number among all of its type, so that neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1024, 4096])
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
    if steps:
        run = Steps(mean, {})
        with torch.no_grad():
            actual = torch.cat([run(x[i : i + 1], ~words[:, i]) for i in range(length)])
    else:
        actual = mean(x, ~words)
    assert actual.dtype == dtype
    distance = (order_number(actual) - order_number(exact.to(dtype))).abs()
    assert distance.max() <= 1 and distance.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_types_keep_theirs(dtype):
    x, mean, state = torch.randn(5, 2, 4, dtype=dtype), RunningMean(), {}
    assert mean(x).dtype == Steps(mean, state)(x[:1]).dtype == dtype
    assert state[mean._state]["vector"].dtype == dtype


class Sizes(TorchDispatchMode):
    """Records the largest number of entries of any tensor that comes into being."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("kind", ["mean", "gate"])
def test_no_square_of_the_length_is_ever_made(kind, padding):
    """Not in the forward nor in the backward pass, at 4,096 positions."""
    length, dim = 4096, 2
    mask = torch.zeros(1, length, dtype=torch.bool) if padding else None
    if padding:
        mask[0, :3] = True
    average = AverageAttention(dim)
    x = torch.randn(length, 1, dim, requires_grad=True)
    run = {"mean": lambda: RunningMean()(x, mask), "gate": lambda: average(x, mask, torch.zeros(1, 1))[0]}[kind]
    with Sizes() as sizes:
        run().sum().backward()
    assert length * dim <= sizes.largest <= 4 * length * dim
    assert saved_bytes(run) <= 4 * 12 * length * dim
    with Sizes() as sizes:
        naive.mean(x[:100], naive.average_mask(torch.ones(1, 100).bool()))
    assert sizes.largest >= 100 * 100, "the measure sees a mask matrix"


def test_dropout_acts_within_the_ffn_in_training_only():
    module = AverageAttention(C, 200, dropout=0.5)
    inputs = []
    module.fc2.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    x = torch.randn(50, B, C)
    module(x, attn_mask=torch.zeros(1, 1))
    module.eval()(x, attn_mask=torch.zeros(1, 1))
    dropped, whole = inputs
    alive = whole > 0
    kept = dropped[alive] != 0
    assert kept.float().mean() == pytest.approx(0.5, abs=0.03)
    torch.testing.assert_close(dropped[alive][kept], 2 * whole[alive][kept])


def test_start_values():
    module = AverageAttention(32)
    assert module.fc1 is None and module.fc2 is None, "its README: the FFN is redundant"
    assert module.gate.weight.shape == (64, 64)
    bound = (6 / 128) ** 0.5
    assert 0.97 * bound < module.gate.weight.abs().max() <= bound
    assert module.gate.bias.eq(0).all()
    with_ffn = AverageAttention(32, 48)
    assert (with_ffn.fc1.weight.shape, with_ffn.fc2.weight.shape) == ((48, 32), (32, 48))
