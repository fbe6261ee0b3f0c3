"""Sums over one buffer whose entries depend on the sums: gradients in any order of use, precision, what is freed.

Running sums have the same weights at all positions (``running_sums.py``, for DLCL), in PyTorch and in Triton's kernels;
position sums have weights of each position (``position_sums.py``, for dynamic weights).
"""

import copy

import pytest
import torch

from fairseq_deep.core import gpu
from fairseq_deep.core.aggregators import position_sums
from fairseq_deep.core.aggregators.running_sums import FusedSums, first_row, make_sums, next_row
from tests.helpers.tensors import DOUBLE, shake

T, B, C, K = 3, 2, 12, 20
each_form = pytest.mark.parametrize("form", ["running", "positions", "kernels"])


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Running sums by Triton's kernels in the interpreter, where the form says so, with few programs."""
    if request.node.callspec.params.get("form") == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(gpu, "on_cpu", True)
        monkeypatch.setattr(gpu.find_kernels(torch.zeros(1)), "PROGRAMS", 4)


def leaves(form, size=K, groups=1):
    """y_0, and all weights: groups x R x R, or one tensor per row."""
    if form != "positions":
        weights = [torch.randn(groups, size, size, **DOUBLE).requires_grad_()]
    else:
        weights = [torch.randn(T, B, row + 1, **DOUBLE).requires_grad_() for row in range(size)]
    return torch.randn(T, B, C, **DOUBLE).requires_grad_(), weights


def masked(weights, window):
    return weights.tril().triu(1 - window)


def sums_of_rows(weights, window, y_0, entry, norms=None):
    """All sums x_0, x_1, ... by rows of *weights*, groups x R x R, where entry(r, x_{r-1}) or its norm is h_r."""
    state = first_row(y_0, masked(weights, window), window)
    sums = [state[0]]
    for row in range(1, weights.size(1)):
        state = next_row(state, row, entry(row, sums[-1]), norms[row] if norms else None)
        sums.append(state[0])
    return sums


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
         ("positions", K, 1, 100), ("kernels", 1, 1, 9), ("kernels", 7, 1, 3), ("kernels", 31, 1, 31)]  # fmt: skip


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


ROUNDED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.016}
WAYS = [("running", groups, (T, B, C), False) for groups in (1, 3, C)]
WAYS += [("kernels", 1, shape, normed) for shape in ((3, 5), (T, B, 11), (1, 1030)) for normed in (False, True)]


@pytest.mark.parametrize("form, groups, shape, normed", WAYS)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_sums_and_gradients_are_rounded_to_their_type_alone(dtype, form, groups, shape, normed):
    """Sums are exact but for two roundings; with norms, which kernels compute, too, a third, and not all are used."""
    size, used, near, found = 31, 20 if normed else 31, ROUNDED[dtype] * (4 if normed else 1), []
    weights = torch.randn(groups, size, size, dtype=torch.promote_types(dtype, torch.float32)) / size
    entries, directions = torch.randn(2, size, *shape, **DOUBLE).to(dtype)
    norms = torch.nn.ModuleList(torch.nn.LayerNorm(shape[-1], dtype=dtype) for _ in range(size * normed))
    shake(norms, 0.5, around=True)
    assert isinstance(make_sums(weights, entries[0], size), FusedSums) == (form == "kernels")
    for exact in (False, True):
        w, *rows = (each.to(torch.float64 if exact else each.dtype).requires_grad_() for each in (weights, *entries))
        own = copy.deepcopy(norms).double() if exact else norms
        if exact:
            inside = torch.stack([rows[0], *(norm(row) for norm, row in zip(own[1:], rows[1:]))] if normed else rows)
            sums = torch.einsum("crk,k...c->r...c", masked(w, size).repeat(shape[-1] // groups, 1, 1), inside).unbind()
        else:
            sums = sums_of_rows(w, size, rows[0], lambda row, _, rows=rows: rows[row], own)
        sources, given = [w, *rows[:used], *own[1:used].parameters()], directions.to(sums[0].dtype)[:used]
        found.append([torch.stack(sums), *torch.autograd.grad(sums[:used], sources, [*given])])
    for number, (got, want) in enumerate(zip(*found)):
        assert got.dtype == (weights.dtype if number == 1 else dtype)
        limit = (near, near if normed else 1e-4)[number] if number < 2 else 4 * near
        torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * float(want.std()))


@pytest.mark.parametrize("form", ["running", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_have_more_digits_than_entries(dtype, form):
    """Two equal entries have weights of 1 and of -1 plus a step that is too small for the type of the entries."""
    step = torch.finfo(dtype).eps / 4
    entry = torch.full((T, B, C), 64, dtype=dtype, requires_grad=True)
    sums = sums_of_rows(torch.tensor([[[1, 0], [1, step - 1]]]), 2, entry, lambda *_: entry)
    assert sums[1].eq(64 * step).all()
