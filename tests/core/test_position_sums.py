"""Sums with weights of each position over one buffer: gradients in any order of use, what is freed, what is wrong."""

import pytest
import torch

from fairseq_deep.core.aggregators.position_sums import append, is_tape, learns, read, start_tape

T, B, C, K = 3, 2, 5, 6
DOUBLE = {"dtype": torch.float64}


def leaves(count=K):
    y_0 = torch.randn(T, B, C, **DOUBLE).requires_grad_()
    return y_0, [torch.randn(T, B, row + 1, **DOUBLE).requires_grad_() for row in range(count)]


def naive(y_0, weights):
    """Row r reads h_0 ... h_r, and h_{r+1} is a function of it; also the sum of all entries."""
    entries, sums = [y_0], []
    for row in weights:
        sums.append((row.unsqueeze(-1) * torch.stack(entries, -2)).sum(-2))
        entries.append(torch.tanh(sums[-1]))
    return sums, sum(entry.square().sum() for entry in entries[:-1])


def taped(y_0, weights):
    kept, token = start_tape(y_0, len(weights), len(weights))
    entries, sums = [kept], []
    for number, row in enumerate(weights):
        x, token = read(token, row)
        sums.append(x)
        if number + 1 < len(weights):
            kept, token = append(token, torch.tanh(x))
            entries.append(kept)
    return sums, sum(entry.square().sum() for entry in entries)


@pytest.mark.parametrize("used", [[0], [4], [1, 3], range(K)], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["sums", "entries"])
def test_any_of_the_sums_and_entries_can_have_a_gradient(used, own):
    y_0, weights = leaves()
    grads = []
    for sums, entries in (naive(y_0, weights), taped(y_0, weights)):
        total = sum(sums[row].sin().sum() for row in used) + (entries if own else 0)
        grads.append(torch.autograd.grad(total, [y_0, *weights], allow_unused=True))
    for want, got in zip(*grads):
        assert (got is None or not got.any()) if want is None else torch.allclose(got, want)


def test_a_graph_can_be_used_again():
    y_0, weights = leaves()
    sums, _ = taped(y_0, weights)
    torch.autograd.grad(sums[-1].sum(), sums[2], retain_graph=True)  # a backward pass that ends in the middle
    first = torch.autograd.grad(sums[-1].sum(), [y_0, *weights], retain_graph=True)
    second = torch.autograd.grad(sums[-1].sum(), [y_0, *weights], retain_graph=True)
    lower = torch.autograd.grad(sums[2].sum(), y_0)[0]
    want = torch.autograd.grad(naive(y_0, weights)[0][-1].sum(), [y_0, *weights])
    for a, b, exact in zip(first, second, want):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, exact)
    torch.testing.assert_close(lower, torch.autograd.grad(naive(y_0, weights)[0][2].sum(), y_0)[0])


def test_weights_learn_where_the_first_entry_does_not():
    y_0, weights = leaves()
    want = torch.autograd.grad(naive(y_0.detach(), weights)[0][-1].sum(), weights)
    got = torch.autograd.grad(taped(y_0.detach(), weights)[0][-1].sum(), weights)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_what_a_backward_pass_wants_is_freed_by_it():
    y_0, weights = leaves()
    sums, _ = taped(y_0, weights)
    node = sums[-1].grad_fn
    sums[-1].sum().backward()
    assert node.tape.entries is None and node.tape.gradients is None
    with pytest.raises(RuntimeError, match="already been freed"):
        assert node.saved_tensors


def test_two_stacks_at_once_do_not_meet():
    y_0, weights = leaves(2)
    one, other = start_tape(y_0, 1, 2)[1], start_tape(2 * y_0, 1, 2)[1]
    (x, one), (_, other) = read(one, weights[0]), read(other, weights[0])
    torch.testing.assert_close(x, weights[0] * y_0)
    torch.testing.assert_close(read(other, weights[0])[0], 2 * weights[0] * y_0)
    torch.testing.assert_close(torch.autograd.grad(x.sum(), y_0)[0], weights[0].expand(T, B, C))


def test_more_than_announced_is_an_error():
    y_0, weights = leaves(1)
    token = start_tape(y_0, 1, 1)[1]
    with pytest.raises(AssertionError, match="more entries"):
        append(token, y_0)
    token = read(token, weights[0])[1]
    with pytest.raises(AssertionError, match="more rows"):
        read(token, weights[0])


def test_the_state_tells_a_tape_from_entries():
    y_0, _ = leaves(1)
    assert is_tape([y_0, start_tape(y_0, 1, 1)[1]], 1) and not is_tape([y_0, y_0], 1)
    assert learns(y_0.detach(), y_0)
    with torch.no_grad():
        assert not learns(y_0)
