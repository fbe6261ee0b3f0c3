"""Gated recurrence over positions as a scan: O(log T) operations instead of T.

With a_t = sigmoid(z_t) and c_0 = 0,

    c_t = a_t * c_{t-1} + (1 - a_t) * v_t

Two neighbouring steps combine to one step of the same form, with a = a_t a_{t-1} and b = b_t + a_t b_{t-1}. Factors are
in [0, 1], so products can underflow to 0 but not overflow; there are no divisions or logarithms. For the gradient dc

    G_t = dc_t + a_{t+1} * G_{t+1}                   the total gradient of c_t: the same scan, backwards
    dv_t = G_t * (1 - a_t),   da_t = G_t * (c_{t-1} - v_t)

Autograd would store the products of all levels; this implementation stores a, v and c.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import is_compiling


def scan_(a: Tensor, b: Tensor) -> Tensor:
    """Compute c_t = a_t * c_{t-1} + b_t over the first dimension, T x ..., in place in *b*; a_1 is not used.

    A scan of half the length over pairs of positions gives every second c, from which the others follow.
    """
    if b.size(0) > 1:
        second_a, second_b, pairs = a[1::2], b[1::2], b.size(0) // 2 * 2
        second_b.addcmul_(second_a, b[:pairs:2])
        scan_(second_a * a[:pairs:2], second_b)
        b[2::2].addcmul_(a[2::2], b[1:-1:2])
    return b


def _forward(z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and c, contiguous like the fake tensors of :func:`_opaque`."""
    a = torch.sigmoid(z.contiguous())
    return a, scan_(a, (1 - a) * v.contiguous())


def _backward(d_c: Tensor, a: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return dz and dv, contiguous."""
    total = scan_(a.roll(-1, 0).flip(0), d_c.contiguous().flip(0)).flip(0)
    difference = -v.contiguous()
    difference[1:] += c[:-1]
    return torch.ops.aten.sigmoid_backward(difference.mul_(total), a), total * (1 - a)


class _GatedRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, v: Tensor) -> Tensor:
        a, c = _forward(z, v)
        ctx.save_for_backward(a, v, c)
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx, d_c: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(d_c, *ctx.saved_tensors)


def _save(ctx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[0], inputs[1], output[1])


def _opaque() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the recurrence as an opaque operation: a compiler would recompile :func:`scan_` for each length."""
    name, two = "fairseq_deep::gated_recurrence", "-> (Tensor, Tensor)"
    forward = torch.library.custom_op(name, _forward, mutates_args=(), schema=f"(Tensor z, Tensor v) {two}")
    schema = f"(Tensor d_c, Tensor a, Tensor v, Tensor c) {two}"
    backward = torch.library.custom_op(f"{name}_backward", _backward, mutates_args=(), schema=schema)
    forward.register_fake(lambda z, v: (z.new_empty(z.shape), v.new_empty(v.shape)))
    backward.register_fake(lambda d_c, a, v, c: (a.new_empty(a.shape), v.new_empty(v.shape)))
    forward.register_autograd(lambda ctx, _, d_c: backward(d_c, *ctx.saved_tensors), setup_context=_save)
    return forward


_compiled = _opaque()


def gated_recurrence(z: Tensor, v: Tensor) -> Tensor:
    """Return c (T x B x C) for the arguments *z* of the gates and the inputs *v*, both T x B x C and of one type.

    Where *z* is infinite, c keeps its previous value, and *v* has no effect.
    """
    return _compiled(z, v)[1] if is_compiling() else _GatedRecurrence.apply(z, v)
