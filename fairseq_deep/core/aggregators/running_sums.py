"""Sums x_r = sum_{k<=r} w_rk h_k for r = 0, 1, ..., over one buffer; h_r is known only after x_{r-1}.

Sums over lists of tensors launch one kernel per term. Here all h are in one buffer, and a sum is one product with it.
Rows share reads of the buffer: before row r = b, 2b, ... one product

    p_j = sum_{k<r} w_jk h_k,    j = r ... r+b-1

reads the buffer once for b rows, and x_j = p_j + sum_{r<=k<=j} w_jk h_k reads b entries at most.

The gradients have the same form, with the rows reversed and the weights transposed: with X_r the gradient of x_r,

    dL/dh_k = sum_{r>=k} w_rk X_r,    dL/dw_rk = <X_r, h_k>

where X_r comes in the order r = R-1, R-2, ..., 0. The backward pass therefore runs the same code, and one product at
its end gives the gradients of all weights, in fp32. Autograd stores each entry h once.

In half precision, each w is a sum of two numbers, its rounded value and the remainder: 22 bits in fp16, 16 in bf16.
Products accumulate in fp32. Only p_j, the two parts of a sum, and the sum are rounded. Gradients of entries use the
rounded w, like the gradients of a linear layer.

On a GPU, one kernel per row reads all earlier entries, with weights in fp32 (:class:`FusedSums`).

Shapes: *weights* are groups x R x R, where feature i of an entry has the weight of group i mod groups; the buffer is
groups x R x M, with M the number of values of a group.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import no_autocast
from fairseq_deep.core.gpu import find_kernels
from fairseq_deep.core.keep_fp32 import HALF
from fairseq_deep.core.native.functions import weighted_sum
from fairseq_deep.core.native.packed import runs_native

# products of half-precision matrices with an output in fp32
HAS_OUT_DTYPE = "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None  # torch 2.8


def split(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Split *weights* (groups x R x K) into p addends of *dtype*, groups x R x p x K; p = 2 in half precision."""
    if dtype not in HALF:
        return weights.to(dtype).unsqueeze(2)
    high = weights.to(dtype)
    return torch.stack([high, (weights - high).to(dtype)], dim=2)


def product(parts: Tensor, entries: Tensor, added: Tensor | None = None) -> Tensor:
    """Multiply *parts* (groups x R x p x K) by *entries* (groups x K x M), and add *added*: groups x Rp x M."""
    factors = parts.flatten(1, 2)
    with no_autocast(entries):
        return torch.bmm(factors, entries) if added is None else torch.baddbmm(added, factors, entries)


def grouped(entry: Tensor, groups: int) -> Tensor:
    """View *entry* (... x C) by group, groups x M."""
    return entry.view(-1, groups).t()


def joined(rows: Tensor, shape: list[int]) -> Tensor:
    """Return an entry of *shape* from the products *rows* of one row of weights, groups x p x M."""
    if rows.size(1) == 1:
        return rows[:, 0].t().contiguous().view(shape)
    if torch.is_grad_enabled():
        return (rows[:, 0] + rows[:, 1]).t().contiguous().view(shape)
    entry = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    torch.add(rows[:, 0], rows[:, 1], out=grouped(entry, rows.size(0)))
    return entry


class RunningSums:
    """Computes the sums of all rows in one direction, forward or backward.

    Args:
        weights: groups x R x R, 0 above the diagonal and outside the window
        entry: an entry, for its shape and type
        window: maximum number of entries in a sum
        exact: in half precision, each weight is a sum of two numbers
    """

    def __init__(self, weights: Tensor, entry: Tensor, window: int, exact: bool):
        self.parts = split(weights, entry.dtype) if exact else weights.to(entry.dtype).unsqueeze(2)
        self.shape, self.window = entry.shape, window
        self.groups, self.rows = weights.size(0), weights.size(1)
        self.block = self.rows if self.rows <= 8 else round(self.rows**0.5)
        self.entries = entry.new_empty(self.groups, self.rows, entry.numel() // self.groups)
        self.ahead: Tensor | None = None
        self.count = 0

    def append(self, entry: Tensor) -> Tensor:
        """Append h_r; return x_r."""
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
        """Return the last entry, groups x M, in the buffer."""
        return self.entries[:, self.count - 1]


class FusedSums:
    """:class:`RunningSums` for one weight per entry: each row is one kernel, with weights in fp32.

    Args:
        kernels: the module of the kernels
        weights, entry, window: see :class:`RunningSums`
    """

    def __init__(self, kernels, weights: Tensor, entry: Tensor, window: int):
        self.kernels, self.weights, self.shape, self.window = kernels, weights[0].contiguous(), entry.shape, window
        self.rows = weights.size(1)
        self.entries = entry.new_empty(1, self.rows, entry.numel())
        self.count = 0

    def append(self, entry: Tensor) -> Tensor:
        """Append h_r; return x_r."""
        return self.kernels.append_row(self._fitted(entry), *self._next())

    def append_normed(self, entry: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Append h_r = LN(*entry*); return x_r."""
        return self.kernels.append_normed(self._fitted(entry), gain, bias, eps, *self._next())

    def pull_normed(self, grad: Tensor, entry: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Append the gradient *grad* of x_r; return the gradients of *entry*, gain and bias of its norm."""
        return self.kernels.pull_normed(self._fitted(grad), entry.contiguous(), gain, eps, *self._next())

    def _fitted(self, entry: Tensor) -> Tensor:
        return entry.to(self.entries.dtype).contiguous()

    def _next(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the buffer, the weights of the next row, its number, and the first row that it reads."""
        row, self.count = self.count, self.count + 1
        return self.entries[0], self.weights[row], row, max(0, self.count - self.window)


def make_sums(weights: Tensor, entry: Tensor, window: int, exact: bool = True) -> RunningSums | FusedSums:
    """Return the sums of one direction; see :class:`RunningSums`."""
    kernels = find_kernels(entry) if weights.size(0) == 1 else None
    if kernels is None:
        return RunningSums(weights, entry, window, exact)
    return FusedSums(kernels, weights.to(torch.promote_types(entry.dtype, torch.float32)), entry, window)


class Tape:
    """State shared by all rows of a forward pass and of its backward pass.

    Args:
        weights, window: see :func:`first_row`
        entry: the first entry
    """

    def __init__(self, weights: Tensor, entry: Tensor, window: int):
        self.weights, self.learn, self.window = weights.detach(), weights.requires_grad, window
        self.forward: RunningSums | FusedSums | None = make_sums(self.weights, entry, window)
        self.backward: RunningSums | FusedSums | None = None
        self.entries: list[Tensor] = []

    def append(self, entry: Tensor, row: int, norm: tuple[Tensor, Tensor, float] | None) -> tuple[Tensor, Tensor]:
        """Append h_r; return x_r and the tensor for the backward pass: h_r in the buffer, or the buffer at the end.

        With the gain, bias and eps of a *norm*, h_r is LN(*entry*).
        """
        sums = self.forward
        assert sums is not None and sums.count == row, "rows must be written once each, in order"
        x = sums.append(entry) if norm is None else sums.append_normed(entry, *norm)
        if sums.count < sums.rows:
            return x, sums.entries[:, sums.count - 1]
        self.forward = None  # from now on only the graph holds the entries
        return x, sums.entries

    def pull(self, row: int, grad: Tensor, kept: Sequence[Tensor], norm: tuple | None = None) -> list[Tensor]:
        """Return the gradient of h_r for the gradient *grad* of x_r.

        Args:
            kept: the tensor of :meth:`append`, if saved
            norm: entry, gain and eps of h_r's norm; the result is then the gradients of entry, gain and bias
        """
        if self.backward is None:
            weights = self.weights[:, : row + 1, : row + 1].flip(1, 2).transpose(1, 2)
            self.backward, self.entries = make_sums(weights, grad, self.window, exact=False), []
        self.entries.extend(kept)
        return [self.backward.append(grad)] if norm is None else list(self.backward.pull_normed(grad, *norm))

    def weight_gradient(self) -> Tensor:
        """Return <X_r, h_k> for all pairs, at the end of a backward pass."""
        rows = self.weights.size(1)
        missing = rows - self.backward.rows
        entries = torch.stack(self.entries[::-1], dim=1) if missing else self.entries[0]
        found = inner_products(self.backward.entries, entries, self.weights.dtype).flip(1)
        return F.pad(found, (0, missing, 0, missing)) if missing else found

    def rewind(self) -> None:
        """Discard the state of the backward pass."""
        self.backward, self.entries = None, []


def inner_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b^T (groups x R x R) of *a* and *b* (groups x R x M), accumulated in *dtype*."""
    with no_autocast(a):
        if a.dtype in HALF and a.device.type in ("cuda", "meta") and HAS_OUT_DTYPE:
            return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
        return torch.bmm(a.to(dtype), b.to(dtype).transpose(1, 2))


class _Row(torch.autograd.Function):
    """Maps h_r and a token to x_r and a token; tokens chain the rows to fix the order of their gradients."""

    @staticmethod
    def forward(ctx, entry, token, weights, gain, bias, eps, tape: Tape, row: int):
        x, kept = tape.append(entry, row, None if gain is None else (gain, bias, eps))
        ctx.tape, ctx.row, ctx.shape, ctx.dtypes = tape, row, x.shape, (entry.dtype, x.dtype)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        # own version counter: later rows of the buffer do not change it
        ctx.save_for_backward(*(() if gain is None else (entry, gain)), *((kept.data,) if tape.learn else ()))
        return x, x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, token: Tensor | None):
        tape: Tape = ctx.tape
        if token is None:  # a backward pass begins here, and the previous one may have been interrupted
            tape.rewind()
        if grad is None:
            grad = tape.weights.new_zeros(ctx.shape, dtype=ctx.dtypes[1])
        saved, norm = ctx.saved_tensors, None
        if ctx.eps is not None:
            norm, saved = (*saved[:2], ctx.eps), saved[2:]
        pulled, *of_norm = tape.pull(ctx.row, grad, saved, norm)
        pulled, of_norm = pulled.to(ctx.dtypes[0]), of_norm or (None, None)
        if ctx.row > 0:
            return pulled, pulled.new_empty(0), None, *of_norm, None, None, None
        weights = tape.weight_gradient() if ctx.needs_input_grad[2] else None
        tape.rewind()
        return pulled, None, weights, None, None, None, None, None


def first_row(entry: Tensor, weights: Tensor, window: int) -> list[Tensor]:
    """Return [x_0, token] for h_0.

    Args:
        entry: h_0, ... x C
        weights: groups x R x R, differentiable, 0 where nothing is read
        window: maximum number of entries in a sum
    """
    tape = Tape(weights, entry, window)
    return list(_Row.apply(entry, None, weights, None, None, None, tape, 0))


def next_row(state: list[Tensor], row: int, entry: Tensor, norm: nn.Module | None = None) -> list[Tensor]:
    """Return [x_r, token] for h_r and the result *state* of :func:`first_row` or this function for row r-1.

    Args:
        entry: h_r, or with *norm*, its input
    """
    tape: Tape = state[1].grad_fn.tape
    inside: tuple = (None, None, None)
    if isinstance(norm, nn.LayerNorm) and isinstance(tape.forward, FusedSums):
        kernels = find_kernels(entry, norm.weight, norm.bias)
        if kernels is not None and entry.size(-1) <= kernels.WIDEST:
            inside, norm = (norm.weight, norm.bias, norm.eps), None
    entry = entry if norm is None else norm(entry)
    return list(_Row.apply(entry, state[1], None, *inside, tape, row))


def is_row(state: list[Tensor]) -> bool:
    """Return whether *state* fits :func:`next_row`: its last tensor is a token, and only tokens are vectors."""
    return state[-1].dim() == 1


def single_sum(parts: Tensor, entries: list[Tensor]) -> Tensor:
    """Return the sum over K *entries* (... x C) with *parts* (groups x p x K, see :func:`split`), differentiable."""
    if parts.shape[:2] == (1, 1) and runs_native(entries[0]):
        return weighted_sum(parts.view(-1), entries)
    stacked = torch.stack([grouped(entry, parts.size(0)) for entry in entries], dim=1)
    return joined(product(parts.unsqueeze(1), stacked), entries[0].shape)
