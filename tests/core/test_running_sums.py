"""Sums of a triangle of weights, row by row: values, gradients in any order of use, precision, memory."""

import pytest
import torch

from fairseq_deep.core.aggregators.running_sums import first_row, is_row, next_row, single_sum, split

T, B, C = 3, 2, 12
GROUPS = pytest.mark.parametrize("groups", [1, 3, C], ids=["scalar", "scalar_3", "vector"])


def band(size, window, groups, dtype=torch.float64):
    """Random weights, groups x R x R."""
    return torch.randn(groups, size, size, dtype=dtype).tril().triu(1 - window)


def naive(weights, functions, y_0):
    """All x_r, where the next entry is a function of the last x."""
    entries, sums = [y_0], []
    for row in range(weights.size(1)):
        spread = [weights[:, row, k].repeat(C // weights.size(0)) for k in range(row + 1)]
        sums.append(sum(entry * weight for entry, weight in zip(entries, spread)))
        entries.append(functions(row, sums[-1]))
    return sums


def chained(weights, functions, y_0, window):
    """The same with running sums."""
    state = first_row(y_0, weights, window)
    sums = [state[0]]
    for row in range(1, weights.size(1)):
        state = next_row(state, row, functions(row - 1, sums[-1]))
        sums.append(state[0])
    return sums


def step(row, x):
    return torch.tanh(x + 0.1 * row)


def leaves(size, window, groups):
    return band(size, window, groups).requires_grad_(), torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)


@GROUPS
@pytest.mark.parametrize("size", [1, 2, 7, 9, 20, 31])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_sums_and_gradients_equal_the_equation(size, window, groups):
    weights, y_0 = leaves(size, window, groups)
    expected, actual = naive(weights, step, y_0), chained(weights, step, y_0, window)
    for want, got in zip(expected, actual):
        torch.testing.assert_close(got, want)
    direction = torch.randn(T, B, C, dtype=torch.float64)
    want = torch.autograd.grad(expected[-1], [weights, y_0], direction)
    got = torch.autograd.grad(actual[-1], [weights, y_0], direction)
    read = torch.ones_like(weights).tril().triu(1 - window)
    torch.testing.assert_close(got[0] * read, want[0] * read)  # who masks the weights masks their gradient
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("used", [[0], [4], [3, 9], [0, 19], range(20)], ids=str)
def test_any_of_the_sums_can_have_a_gradient(used):
    """Rows above the highest that is used do not take part."""
    weights, y_0 = leaves(20, 20, 1)
    expected, actual = naive(weights, step, y_0), chained(weights, step, y_0, 20)
    want = torch.autograd.grad(sum(expected[row].sin().sum() for row in used), [weights, y_0])
    got = torch.autograd.grad(sum(actual[row].sin().sum() for row in used), [weights, y_0])
    torch.testing.assert_close(got[0].tril(), want[0])
    torch.testing.assert_close(got[1], want[1])


def test_a_graph_can_be_used_again():
    weights, y_0 = leaves(9, 9, 1)
    sums = chained(weights, step, y_0, 9)
    # a backward pass that ends in the middle, then two whole ones
    torch.autograd.grad(sums[-1].sum(), sums[4], retain_graph=True)
    first = torch.autograd.grad(sums[-1].sum(), [weights, y_0], retain_graph=True)
    second = torch.autograd.grad(sums[-1].sum(), [weights, y_0])
    for a, b in zip(first, second):
        assert torch.equal(a, b)
    torch.testing.assert_close(first[1], torch.autograd.grad(naive(weights, step, y_0)[-1].sum(), y_0)[0])


def test_a_backward_pass_may_begin_where_one_has_ended():
    """The first stops above row 4, the second begins with it."""
    weights, y_0 = leaves(9, 9, 1)
    sums, exact = chained(weights, step, y_0, 9), naive(weights, step, y_0)
    torch.autograd.grad(sums[-1].sin().sum(), sums[4], retain_graph=True)
    got = torch.autograd.grad(sums[4].sin().sum(), [weights, y_0])
    want = torch.autograd.grad(exact[4].sin().sum(), [weights, y_0])
    torch.testing.assert_close(got[0].tril(), want[0])
    torch.testing.assert_close(got[1], want[1])


def test_a_row_is_written_once():
    weights, y_0 = leaves(3, 3, 1)
    state = first_row(y_0, weights, 3)
    next_row(state, 1, y_0)
    with pytest.raises(AssertionError, match="written once"):
        next_row(state, 1, y_0)


def test_two_stacks_at_once_do_not_meet():
    weights, y_0 = leaves(9, 9, 1)
    alone = torch.autograd.grad(chained(weights, step, y_0, 9)[-1].sum(), y_0)[0]
    one, other = first_row(y_0, weights, 9), first_row(2 * y_0, weights, 9)
    for row in range(1, 9):
        one, other = next_row(one, row, step(row - 1, one[0])), next_row(other, row, step(row - 1, other[0]))
    torch.testing.assert_close(torch.autograd.grad(one[0].sum() + 0 * other[0].sum(), y_0)[0], alone)


def test_fixed_weights_and_a_frozen_first_entry():
    weights, y_0 = leaves(9, 9, 1)
    want = torch.autograd.grad(naive(weights, step, y_0)[-1].sum(), [weights, y_0])
    got = torch.autograd.grad(chained(weights.detach(), step, y_0, 9)[-1].sum(), y_0)[0]
    torch.testing.assert_close(got, want[1])
    got = torch.autograd.grad(chained(weights, step, y_0.detach(), 9)[-1].sum(), weights)[0]
    torch.testing.assert_close(got.tril(), want[0])


@GROUPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, groups):
    """Sums are exact but for two roundings of the result; gradients of weights are exact for the gradients given."""
    size, eps = 31, torch.finfo(dtype).eps
    weights = (band(size, size, groups, torch.float32) / size).requires_grad_()
    entries = [torch.randn(T, B, C).to(dtype).requires_grad_() for _ in range(size)]
    state = first_row(entries[0], weights, size)
    sums = [state[0]]
    for row in range(1, size):
        state = next_row(state, row, entries[row])
        sums.append(state[0])
    exact_weights = weights.detach().double().requires_grad_()
    exact_entries = [entry.detach().double().requires_grad_() for entry in entries]
    exact = naive(exact_weights, lambda row, x: exact_entries[min(row + 1, size - 1)], exact_entries[0])
    for want, got in zip(exact, sums):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=2 * eps * 0.2)
    directions = [torch.randn(T, B, C).to(dtype) for _ in range(size)]
    torch.autograd.backward(sums, directions)
    torch.autograd.backward(exact, [direction.double() for direction in directions])
    assert weights.grad.dtype == torch.float32
    torch.testing.assert_close(weights.grad.tril().double(), exact_weights.grad, rtol=1e-4, atol=1e-4)
    for want, got in zip(exact_entries, entries):
        assert got.grad.dtype == dtype
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=4 * eps, atol=4 * eps * 0.2)


def test_the_sums_see_a_weight_that_half_precision_cannot_hold():
    """1 + 2^-13 is 1 in fp16; two entries that cancel show the rest."""
    weights = torch.tensor([[[1.0, 0.0], [1 + 2**-13, -1.0]]])
    x = torch.full((1, 1, 4), 2.0, dtype=torch.float16, requires_grad=True)
    state = next_row(first_row(x, weights, 2), 1, x)
    assert state[0].eq(2**-12).all()
    with torch.no_grad():
        assert single_sum(split(weights, torch.float16)[:, 1], [x, x]).eq(2**-12).all()


@GROUPS
def test_a_single_sum_equals_a_row(groups):
    weights, y_0 = leaves(5, 5, groups)
    entries = [torch.randn(T, B, C, dtype=torch.float64) for _ in range(5)]
    want = naive(weights, lambda row, x: entries[min(row + 1, 4)], entries[0])[-1]
    torch.testing.assert_close(single_sum(split(weights, torch.float64)[:, 4], entries), want)


def test_the_state_tells_a_row_from_entries():
    weights, y_0 = leaves(3, 3, 1)
    assert is_row(first_row(y_0, weights, 3))
    assert not is_row([weights, y_0])


def test_what_a_backward_pass_wants_is_freed_by_it():
    weights, y_0 = leaves(6, 6, 1)
    sums = chained(weights, step, y_0, 6)
    node = sums[-1].grad_fn
    tape = node.tape
    sums[-1].sum().backward()
    assert tape.forward is None and tape.backward is None and not tape.entries
    with pytest.raises(RuntimeError, match="already been freed"):
        assert node.saved_tensors
