"""x_r = sum_{k<=r} w_rk h_k for r = 0, 1, ..., where h_r is known only after x_{r-1}: all sums over one buffer.

A list of sums over lists of tensors launches a kernel for each term. Here all h stand in one buffer, so that a sum is
one product with it, and a few rows ahead share what they read: before row r = b, 2b, ... one product

    p_j = sum_{k<r} w_jk h_k,    j = r ... r+b-1

reads the buffer once for b rows, and x_j = p_j + sum_{r<=k<=j} w_jk h_k reads b entries at most.

The gradients have the same form, with the rows reversed and the weights transposed: with X_r the gradient of x_r,

    dL/dh_k = sum_{r>=k} w_rk X_r,    dL/dw_rk = <X_r, h_k>

where X_r comes in the order r = R-1, R-2, ..., 0. So the backward pass runs the same code, and one product at its end
gives the gradients of all weights, in fp32. Autograd keeps h, each entry once.

In half precision a sum multiplies with two numbers for each w, its value in that type and what is left of it: 22 bits
in fp16, 16 in bf16. Products add up in fp32; what is rounded are p_j, the two parts of a sum, and the sum. Gradients of
entries use the first of the two numbers, as those of a linear layer use its weight.

Shapes: *weights* are groups x R x R, where feature i of an entry has the weight of group i mod groups; the buffer is
groups x R x M, with M the number of values of a group.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import no_autocast
from fairseq_deep.core.native.packed import runs_native, weighted_sum

# a product of half-precision matrices that is not rounded to their type
HAS_OUT_DTYPE = "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None  # torch 2.8


def is_half(dtype: torch.dtype) -> bool:
    """Whether *dtype* is one of the half-precision types."""
    return dtype == torch.float16 or dtype == torch.bfloat16


def split(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """*weights* (groups x R x K) as sums of p numbers of *dtype*, groups x R x p x K; p is 2 in half precision."""
    if not is_half(dtype):
        return weights.to(dtype).unsqueeze(2)
    high = weights.to(dtype)
    return torch.stack([high, (weights - high).to(dtype)], dim=2)


def product(parts: Tensor, entries: Tensor, added: Tensor | None = None) -> Tensor:
    """groups x Rp x M for *parts* (groups x R x p x K) and *entries* (groups x K x M); *added* has its shape."""
    factors = parts.flatten(1, 2)
    with no_autocast(entries):
        return torch.bmm(factors, entries) if added is None else torch.baddbmm(added, factors, entries)


def grouped(entry: Tensor, groups: int) -> Tensor:
    """The values of *entry* (... x C) by group, groups x M; a view."""
    return entry.view(-1, groups).t()


def joined(rows: Tensor, shape: list[int]) -> Tensor:
    """An entry of that *shape* from what one row of weights gave, groups x p x M."""
    if rows.size(1) == 1:
        return rows[:, 0].t().contiguous().view(shape)
    if torch.is_grad_enabled():
        return (rows[:, 0] + rows[:, 1]).t().contiguous().view(shape)
    entry = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    torch.add(rows[:, 0], rows[:, 1], out=grouped(entry, rows.size(0)))
    return entry


class RunningSums:
    """All sums of one kind, forward or backward.

    Args:
        parts: the weights, groups x R x p x R, 0 above the diagonal and outside of the window; see :func:`split`
        entry: an entry, for its shape and type
        window: entries that a sum reads at most
    """

    def __init__(self, parts: Tensor, entry: Tensor, window: int):
        self.parts, self.shape, self.window = parts, entry.shape, window
        self.groups, self.rows = parts.size(0), parts.size(1)
        self.block = self.rows if self.rows <= 8 else round(self.rows**0.5)
        self.entries = entry.new_empty(self.groups, self.rows, entry.numel() // self.groups)
        self.ahead: Tensor | None = None
        self.count = 0

    def append(self, entry: Tensor) -> Tensor:
        """Take h_r and give x_r."""
        row, number = self.count, self.parts.size(2)
        start = row - row % self.block
        if row == start and row > 0:
            self._look_ahead(row)
        place = self.entries[:, row]
        if self.groups == 1:
            place.view(self.shape).copy_(entry)
        else:
            place.copy_(grouped(entry.contiguous(), self.groups))
        self.count += 1
        first = max(start, self.count - self.window)
        added = None
        if self.ahead is not None:
            added = self.ahead[:, number * (row - start) : number * (row - start + 1)]
        rows = product(self.parts[:, row : row + 1, :, first : row + 1], self.entries[:, first : row + 1], added)
        return joined(rows, self.shape)

    def _look_ahead(self, row: int) -> None:
        first = max(0, row + 1 - self.window)
        self.ahead = None
        if first < row:
            parts = self.parts[:, row : row + self.block, :, first:row]
            self.ahead = product(parts, self.entries[:, first:row])

    def last(self) -> Tensor:
        """The entry that was taken last, groups x M, in the buffer."""
        return self.entries[:, self.count - 1]


class Tape:
    """What the rows of one forward pass share, and those of a backward pass.

    Args:
        weights, window: see :func:`first_row`
        entry: the first entry
    """

    def __init__(self, weights: Tensor, entry: Tensor, window: int):
        self.parts = split(weights.detach(), entry.dtype)
        self.dtype, self.learn, self.window = weights.dtype, weights.requires_grad, window
        self.forward: RunningSums | None = RunningSums(self.parts, entry, window)
        self.backward: RunningSums | None = None
        self.entries: list[Tensor] = []

    def append(self, entry: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Take h_r; give x_r, and what the backward pass wants: h_r in the buffer, or at the end the buffer."""
        sums = self.forward
        assert sums is not None and sums.count == row, "each row is written once, in their order"
        x = sums.append(entry)
        if sums.count < sums.rows:
            return x, sums.entries[:, sums.count - 1]
        self.forward = None  # from now on the graph alone keeps the entries
        return x, sums.entries

    def pull(self, row: int, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """The gradient of h_r for *grad*, that of x_r; *kept* is what :meth:`append` gave if the weights learn."""
        if self.backward is None:
            parts = self.parts[:, : row + 1, :1, : row + 1].flip(1, 3).transpose(1, 3)
            self.backward, self.entries = RunningSums(parts, grad, self.window), []
        self.entries.extend(kept)
        return self.backward.append(grad)

    def weight_gradient(self) -> Tensor:
        """<X_r, h_k> for all pairs, at the end of a backward pass."""
        assert self.backward is not None
        rows = self.parts.size(1)
        missing = rows - self.backward.rows
        entries = torch.stack(self.entries[::-1], dim=1) if missing else self.entries[0]
        found = inner_products(self.backward.entries, entries, self.dtype).flip(1)
        return F.pad(found, (0, missing, 0, missing)) if missing else found

    def rewind(self) -> None:
        """Forget the backward pass."""
        self.backward, self.entries = None, []


def inner_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T (groups x R x R) of *a* and *b* (groups x R x M), added up and given in *dtype*."""
    with no_autocast(a):
        if is_half(a.dtype) and a.device.type in ("cuda", "meta") and HAS_OUT_DTYPE:
            return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
        return torch.bmm(a.to(dtype), b.to(dtype).transpose(1, 2))


class _Row(torch.autograd.Function):
    """One row: h_r and a token -> x_r and a token. Tokens chain the rows, so that gradients come in their order."""

    @staticmethod
    def forward(ctx, entry: Tensor, token: Tensor | None, weights: Tensor | None, tape: Tape, row: int):
        x, kept = tape.append(entry, row)
        ctx.tape, ctx.row, ctx.shape, ctx.dtypes = tape, row, x.shape, (entry.dtype, x.dtype)
        ctx.set_materialize_grads(False)
        if tape.learn:
            ctx.save_for_backward(kept.data)  # its version is its own: other rows of the buffer are yet to be written
        return x, x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, token: Tensor | None):
        tape: Tape = ctx.tape
        if token is None:  # no row above has a part: a backward pass begins, and one before may have ended half-way
            tape.rewind()
        if grad is None:
            grad = tape.parts.new_zeros(ctx.shape, dtype=ctx.dtypes[1])
        pulled = tape.pull(ctx.row, grad, ctx.saved_tensors).to(ctx.dtypes[0])
        if ctx.row > 0:
            return pulled, pulled.new_empty(0), None, None, None
        weights = tape.weight_gradient() if ctx.needs_input_grad[2] else None
        tape.rewind()
        return pulled, None, weights, None, None


def first_row(entry: Tensor, weights: Tensor, window: int) -> list[Tensor]:
    """[x_0, token] for h_0.

    Args:
        entry: h_0, ... x C
        weights: groups x R x R, differentiable, 0 where nothing is read
        window: entries that a sum reads at most
    """
    tape = Tape(weights, entry, window)
    return list(_Row.apply(entry, None, weights, tape, 0))


def next_row(state: list[Tensor], row: int, entry: Tensor) -> list[Tensor]:
    """[x_r, token] for h_r and what :func:`first_row` or this function gave for the row before."""
    return list(_Row.apply(entry, state[1], None, state[1].grad_fn.tape, row))


def is_row(state: list[Tensor]) -> bool:
    """Whether *state* is what :func:`next_row` takes: it ends with a token, which alone is a vector."""
    return state[-1].dim() == 1


def single_sum(parts: Tensor, entries: list[Tensor]) -> Tensor:
    """The sum over K *entries* (... x C) with *parts* (groups x p x K, see :func:`split`), for autograd or without."""
    if parts.shape[:2] == (1, 1) and runs_native(entries[0]):
        return weighted_sum(parts.view(-1), entries)
    stacked = torch.stack([grouped(entry, parts.size(0)) for entry in entries], dim=1)
    return joined(product(parts.unsqueeze(1), stacked), entries[0].shape)
