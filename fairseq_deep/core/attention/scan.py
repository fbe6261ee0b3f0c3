"""A gated recurrence over positions as a scan: O(log T) operations in place of T.

With a_t = sigmoid(z_t) and c_0 = 0,

    c_t = a_t * c_{t-1} + (1 - a_t) * v_t

Two neighbouring steps are one step of the same form, with a = a_t a_{t-1} and b = b_t + a_t b_{t-1}. Factors are in
[0, 1], so their products at worst become 0; nothing is divided, and no logarithm is taken. From the gradient dc

    G_t = dc_t + a_{t+1} * G_{t+1}                   all that reaches c_t: the same scan, backwards
    dv_t = G_t * (1 - a_t),   da_t = G_t * (c_{t-1} - v_t)

Autograd would keep the products of all levels; here a, v and c are kept.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import is_compiling


def scan(a: Tensor, b: Tensor) -> Tensor:
    """c_t = a_t * c_{t-1} + b_t over the first dimension, T x ...; a_1 counts for nothing.

    Pairs of positions give every second c, by a scan of half the length, and these give the others.
    """
    if b.size(0) < 2:
        return b
    c, second_a, pairs = torch.empty_like(b), a[1::2], b.size(0) // 2 * 2
    c[0] = b[0]
    c[1::2] = scan(second_a * a[:pairs:2], torch.addcmul(b[1::2], second_a, b[:pairs:2]))
    torch.addcmul(b[2::2], a[2::2], c[1:-1:2], out=c[2::2])
    return c


def _doubling(a: Tensor, b: Tensor) -> Tensor:
    """The same from all 1, 2, 4, ... positions before each: for a compiler, which can fuse it."""
    reach = 1
    while reach < b.size(0):
        b = torch.cat([b[:reach], torch.addcmul(b[reach:], a[reach:], b[:-reach])])
        a = torch.cat([a[:reach], a[reach:] * a[:-reach]])
        reach *= 2
    return b


class _GatedRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, v: Tensor) -> Tensor:
        a = torch.sigmoid(z)
        c = scan(a, (1 - a) * v)
        ctx.save_for_backward(a, v, c)
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx, d_c: Tensor) -> tuple[Tensor, Tensor]:
        a, v, c = ctx.saved_tensors
        total = scan(a.roll(-1, 0).flip(0), d_c.flip(0)).flip(0)
        difference = -v
        difference[1:] += c[:-1]
        return torch.ops.aten.sigmoid_backward(difference.mul_(total), a), total * (1 - a)


def gated_recurrence(z: Tensor, v: Tensor) -> Tensor:
    """c (T x B x C) for the arguments *z* of the gates and the inputs *v*, both T x B x C and of one type.

    Where *z* is infinity, c stays what it was, and *v* has no effect.
    """
    if not is_compiling():
        return _GatedRecurrence.apply(z, v)
    a = torch.sigmoid(z)  # lengths that differ in their parities would each be a graph of their own in :func:`scan`
    return _doubling(a, (1 - a) * v)
