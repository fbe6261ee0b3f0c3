"""Sums x = sum_{k<=r} a_k h_k with weights per position, for all rows r of a stack, over one buffer.

Weights that depend on the input differ between positions. A row is therefore one product per position, of a_0 ... a_r
with the (r+1) x C matrix of its entries. All entries are in one buffer, in fp32 if the model is in half precision, and
a row is one batched product with the filled part of the buffer. Autograd stores the buffer, and so each entry once.

For the gradient X of a row, the gradients of its weights are one more batched product, <X, h_k>. The gradients of its
entries, a_k X, accumulate in place in one buffer. An entry reads its sum there after all rows that use it have added
their gradients. Tokens chain the calls to enforce this order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import is_compiling, no_autocast


def normed_linear(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return RMSNorm(x) weight^T, without a gain, in the type of *x*; normalises the product, which is narrower."""
    with no_autocast(x):
        return F.linear(x, weight.to(x.dtype)) * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)


def position_sum(weights: Tensor, entries: list[Tensor]) -> Tensor:
    """Compute one row.

    Args:
        weights: T x B x K, in fp32 or fp64
        entries: K tensors, T x B x C

    Returns:
        T x B x C, in the type of the weights
    """
    with no_autocast(weights):
        stacked = torch.stack(entries, dim=-2).to(weights.dtype)
        return torch.matmul(weights.unsqueeze(-2), stacked).squeeze(-2)


def is_tape(state: list[Tensor], index: int) -> bool:
    """Return whether *state* has a token of :func:`start_tape` at *index*: only tokens are vectors."""
    return state[index].dim() == 1


def learns(*tensors: Tensor) -> bool:
    """Return whether rows must store tensors for gradients; compiled code decides for itself."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not is_compiling()


class _Tape:
    """State shared by all rows of a forward pass and of its backward pass.

    Attributes:
        entries: K x positions x C; None after the last row was read, when only the graph holds them
        count: number of entries so far
        gradients: positions x K x C, sums so far
        token: empty tensor that chains the calls
    """

    def __init__(self, entry: Tensor, entries: int, rows: int):
        dtype = torch.promote_types(entry.dtype, torch.float32)
        size = entry.size(-1)
        self.entries: Tensor | None = entry.new_empty((entries, entry.numel() // size, size), dtype=dtype)
        self.count, self.rows = 0, rows
        self.gradients: Tensor | None = None
        self.token = torch.empty(0, device=entry.device)

    def append(self, entry: Tensor) -> Tensor:
        assert self.entries is not None and self.count < len(self.entries), "there are more entries than announced"
        kept = self.entries[self.count].view(entry.shape).copy_(entry)
        self.count += 1
        return kept.data  # .data has its own version counter, which later entries do not change

    def read(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the entries read."""
        assert self.entries is not None and self.rows > 0, "there are more rows than announced"
        entries = self.entries[: self.count].data
        with no_autocast(weights):
            x = torch.bmm(weights.view(-1, 1, self.count), entries.transpose(0, 1))
        self.rows -= 1
        if self.rows == 0:
            self.entries = None
        return x, entries

    def pull(self, weights: Tensor, entries: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of *weights* for the gradient *grad* of their row; accumulate gradients of entries."""
        grad = grad.reshape(-1, 1, grad.size(-1))
        columns = weights.reshape(-1, len(entries), 1)
        with no_autocast(grad):
            if self.gradients is None:
                self.gradients = columns * grad
            else:
                self.gradients[:, : len(entries)].addcmul_(columns, grad)
            return torch.bmm(grad, entries.permute(1, 2, 0)).view(weights.shape)

    def gradient(self, index: int) -> Tensor | None:
        """Return the final gradient of the entry *index* (positions x C); None if no row has read it."""
        if self.gradients is None or index >= self.gradients.size(1):
            return None
        return self.gradients[:, index]


class _Append(torch.autograd.Function):
    """Maps an entry and a token to the entry in the buffer and a token."""

    @staticmethod
    def forward(ctx, entry: Tensor, token: Tensor, tape: _Tape):
        ctx.tape, ctx.index, ctx.dtype, ctx.shape = tape, tape.count, entry.dtype, entry.shape
        ctx.set_materialize_grads(False)
        return tape.append(entry), tape.token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, token: Tensor | None):
        tape: _Tape = ctx.tape
        if token is None:
            tape.gradients = None
        total = tape.gradient(ctx.index)
        if ctx.index == 0:
            tape.gradients = None
        if total is None:
            total = grad
        else:
            total = total.reshape(ctx.shape) if grad is None else grad + total.view(ctx.shape)
        if total is not None:
            total = total.to(ctx.dtype)
        return total, None if ctx.index == 0 else tape.token, None


class _Read(torch.autograd.Function):
    """Maps weights and a token to a sum and a token."""

    @staticmethod
    def forward(ctx, weights: Tensor, token: Tensor, tape: _Tape):
        x, entries = tape.read(weights)
        ctx.tape = tape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, entries)
        return x.view(*weights.shape[:-1], x.size(-1)), tape.token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, token: Tensor | None):
        tape: _Tape = ctx.tape
        weights, entries = ctx.saved_tensors
        if token is None:  # a backward pass begins here, and the previous one may have been interrupted
            tape.gradients = None
        pulled = None if grad is None else tape.pull(weights, entries, grad)
        return pulled, tape.token, None


def start_tape(entry: Tensor, entries: int, rows: int) -> tuple[Tensor, Tensor]:
    """Begin with the first entry.

    Args:
        entry: h_0, T x B x C
        entries: total number of entries
        rows: total number of sums

    Returns:
        h_0 in the buffer, at least in fp32, and a token
    """
    token = torch.empty(0, device=entry.device, requires_grad=True)  # weights may need gradients if *entry* does not
    return _Append.apply(entry, token, _Tape(entry, entries, rows))


def append(token: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Append the next entry (T x B x C); return it in the buffer, and a token."""
    return _Append.apply(entry, token, token.grad_fn.tape)


def read(token: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum (T x B x C) of all entries with *weights* (T x B x K, in the buffer's type), and a token."""
    return _Read.apply(weights, token, token.grad_fn.tape)
