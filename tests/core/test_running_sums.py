"""Sums over one buffer whose entries depend on the sums: gradients in any order of use, precision, what is freed.

Running sums have the same weights at all positions (``running_sums.py``, for DLCL), in PyTorch and in Triton's kernels;
position sums have weights of each position (``position_sums.py``, for dynamic weights).
"""

import pytest
import torch

from fairseq_deep.core import gpu
from fairseq_deep.core.aggregators import position_sums
from tests.helpers.aggregators import sums_of_rows
from tests.helpers.tensors import DOUBLE

T, B, C, K = 3, 2, 12, 20
each_form = pytest.mark.parametrize("form", ["running", "positions", "kernels"])


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Running sums by Triton's kernels in the interpreter, where the form says so."""
    if request.node.callspec.params.get("form") == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(gpu, "on_cpu", True)


def leaves(form, size=K, groups=1):
    """y_0, and all weights: groups x R x R, or one tensor per row."""
    if form != "positions":
        weights = [torch.randn(groups, size, size, **DOUBLE).requires_grad_()]
    else:
        weights = [torch.randn(T, B, row + 1, **DOUBLE).requires_grad_() for row in range(size)]
    return torch.randn(T, B, C, **DOUBLE).requires_grad_(), weights


def masked(weights, window):
    return weights.tril().triu(1 - window)


def naive(form, y_0, weights, window=100):
    """Row r reads h_0 ... h_r, and h_{r+1} is a function of it; all sums, and the entries."""
    entries, sums = [y_0], []
    if form != "positions":
        rows = masked(weights[0], window).repeat(C // len(weights[0]), 1, 1).unbind(1)
        rows = [row.t()[: number + 1] for number, row in enumerate(rows)]
    else:
        rows = [row.unsqueeze(-1).unbind(-2) for row in weights]
    for spread in rows:
        sums.append(sum(weight * entry for weight, entry in zip(spread, entries)))
        entries.append(torch.tanh(sums[-1]))
    return sums, entries[:-1]


def chained(form, y_0, weights, window=100):
    """The same over a buffer."""
    if form == "positions":
        return taped(y_0, weights)
    entries = [y_0]
    sums = sums_of_rows(weights[0], window, y_0, lambda _, x: entries.append(torch.tanh(x)) or entries[-1])
    return sums, entries


def taped(y_0, weights):
    kept, token = position_sums.start_tape(y_0, len(weights), len(weights))
    entries, sums = [kept], []
    for row in weights:
        if sums:
            kept, token = position_sums.append(token, torch.tanh(sums[-1]))
            entries.append(kept)
        x, token = position_sums.read(token, row)
        sums.append(x)
    return sums, entries


def grads(total, y_0, weights, **options):
    """Zeros for what *total* does not depend on."""
    sources = [source for source in (y_0, *weights) if source.requires_grad]
    found = torch.autograd.grad(total, sources, allow_unused=True, **options)
    return [torch.zeros_like(source) if grad is None else grad for source, grad in zip(sources, found)]


# rows, groups of features with weights of their own, window; running sums take rows in blocks
SIZES = [("running", 1, 1, 100), ("running", 9, C, 1), ("running", K, 1, 100), ("running", 31, 3, 4),
         ("positions", K, 1, 100)]  # fmt: skip


@pytest.mark.parametrize("form, size, groups, window", SIZES)
@pytest.mark.parametrize("used", [[0], [4], [3, 9], [0, 19], range(31)], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["sums", "entries"])
def test_sums_equal_the_equation_and_any_of_them_can_have_a_gradient(used, own, form, size, groups, window):
    """Rows above the highest that is used do not take part."""
    given, found = leaves(form, size, groups), []
    for function in (naive, chained):
        sums, entries = function(form, *given, window)
        total = sum(sums[row].sin().sum() for row in {row % size for row in used})
        gradients = grads(total + own * sum(entry.square().sum() for entry in entries), *given)
        found.append([torch.stack(sums), *gradients])
    torch.testing.assert_close(found[1], found[0])


@each_form
def test_a_graph_can_be_used_again(form):
    """After a backward pass that ends in the middle; the last one begins where that has ended."""
    given = leaves(form)
    sums, exact = chained(form, *given)[0], naive(form, *given)[0]
    torch.autograd.grad(sums[-1].sin().sum(), sums[4], retain_graph=True)
    first, second = (grads(sums[-1].sin().sum(), *given, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, grads(exact[-1].sin().sum(), *given, retain_graph=True))
    torch.autograd.grad(sums[-1].sin().sum(), sums[4], retain_graph=True)
    torch.testing.assert_close(grads(sums[4].sin().sum(), *given), grads(exact[4].sin().sum(), *given))


@each_form
@pytest.mark.parametrize("frozen", ["weights", "first entry"])
def test_what_is_frozen_has_no_gradient(frozen, form):
    y_0, weights = leaves(form)
    y_0, weights = (y_0, [row.detach() for row in weights]) if frozen == "weights" else (y_0.detach(), weights)
    want, got = (grads(function(form, y_0, weights)[0][-1].sum(), y_0, weights) for function in (naive, chained))
    torch.testing.assert_close(got, want)


@each_form
def test_what_a_backward_pass_wants_is_freed_by_it(form):
    node = (sums := chained(form, *leaves(form))[0])[-1].grad_fn
    sums[-1].sum().backward()
    names = ("entries", "gradients") if form == "positions" else ("forward", "backward")
    assert all(getattr(node.tape, name) is None for name in names) and not node.tape.entries
    with pytest.raises(RuntimeError, match="already been freed"):
        assert node.saved_tensors


@pytest.mark.parametrize("groups", [1, 3, C])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, groups):
    """Sums are exact but for two roundings of the result; gradients of weights are exact for the gradients given."""
    size, eps = 31, torch.finfo(dtype).eps
    weights = (masked(torch.randn(groups, size, size), size) / size).requires_grad_()
    entries = [torch.randn(T, B, C).to(dtype).requires_grad_() for _ in range(size)]
    sums = sums_of_rows(weights, size, entries[0], lambda row, _: entries[row])
    exact_weights = weights.detach().double().requires_grad_()
    features = exact_weights.repeat(C // groups, 1, 1)
    exact = torch.einsum("crk,ktbc->rtbc", features, torch.stack(entries).detach().double())
    assert {entry.dtype for entry in sums} == {dtype}
    torch.testing.assert_close(torch.stack(sums).double(), exact, rtol=2 * eps, atol=2 * eps * 0.2)
    directions = torch.randn(size, T, B, C).to(dtype)
    torch.autograd.backward(sums, list(directions))
    exact.backward(directions.double())
    assert weights.grad.dtype == torch.float32
    torch.testing.assert_close(weights.grad.tril().double(), exact_weights.grad.tril(), rtol=1e-4, atol=1e-4)
