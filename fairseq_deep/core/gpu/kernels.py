"""The Triton kernels and the functions that start them.

Sums and statistics are at least in fp32. A program handles a block of values, or the features of one position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # values
WIDEST = 4096  # features of a position that a program can hold
PROGRAMS = 1024  # that share the sums over positions


def _wide(tensor: Tensor) -> tl.dtype:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def _width(size: int) -> dict[str, int]:
    """Options of a kernel with one position per program: at most four features a thread, else registers spill."""
    width = triton.next_power_of_2(size)
    return {"WIDTH": width, "num_warps": min(max(width // 128, 4), 32)}


@triton.jit
def _add_rows(total, rows, weights, first, last, size, inside, WIDE: tl.constexpr):
    """Add sum_k w_k h_k over the rows k = *first* ... *last* - 1, each of *size* values, to *total*."""
    rows += tl.cast(first, tl.int64) * size
    for k in range(first, last):
        total += tl.load(weights + k) * tl.load(rows, mask=inside, other=0.0).to(WIDE)
        rows += size
    return total


@triton.jit(do_not_specialize=["row", "first"])
def _append_row(entry, entries, weights, y, row, first, size, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    new = tl.load(entry + places, mask=inside)
    tl.store(entries + tl.cast(row, tl.int64) * size + places, new, mask=inside)
    total = tl.load(weights + row) * new.to(WIDE)
    total = _add_rows(total, entries + places, weights, first, row, size, inside, WIDE)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=inside)


def append_row(entry: Tensor, entries: Tensor, weights: Tensor, row: int, first: int) -> Tensor:
    """Store *entry* as row *row* of *entries*; return sum_k w_k h_k over the rows k = *first* ... *row*.

    Args:
        entry: h_r, contiguous
        entries: R x M, with M the number of values of an entry
        weights: R, in fp32 or fp64
    """
    y, size = torch.empty_like(entry), entry.numel()
    with torch.cuda.device_of(entry):
        _append_row[(triton.cdiv(size, BLOCK),)](
            entry, entries, weights, y, row, first, size, BLOCK=BLOCK, WIDE=_wide(entry)
        )
    return y


@triton.jit
def _normed(x, places, inside, size, eps, WIDE: tl.constexpr):
    """Features (x - mean) / sqrt(var + eps) of a position, and the factor 1 / sqrt(var + eps)."""
    value = tl.load(x + places, mask=inside, other=0.0).to(WIDE)
    centred = tl.where(inside, value - tl.sum(value) / size, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred) / size + eps)
    return centred * factor, factor


@triton.jit
def _through_norm(d_y, normed, factor, gain, inside, size):
    """The gradient of a layer norm's input for the gradient *d_y* of its output."""
    d_normed = tl.where(inside, d_y * gain, 0.0)
    return factor * (d_normed - tl.sum(d_normed) / size - normed * (tl.sum(d_normed * normed) / size))


@triton.jit(do_not_specialize=["row", "first"])
def _append_normed(entry, gain, bias, entries, weights, y, row, first, size, values, eps,
                   WIDTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    at, places = tl.program_id(0).to(tl.int64) * size, tl.arange(0, WIDTH)
    inside = places < size
    normed, _ = _normed(entry + at, places, inside, size, eps, WIDE)
    new = normed * tl.load(gain + places, mask=inside, other=0.0).to(WIDE)
    new = (new + tl.load(bias + places, mask=inside, other=0.0).to(WIDE)).to(entries.dtype.element_ty)
    tl.store(entries + tl.cast(row, tl.int64) * values + at + places, new, mask=inside)
    total = tl.load(weights + row) * new.to(WIDE)
    total = _add_rows(total, entries + at + places, weights, first, row, values, inside, WIDE)
    tl.store(y + at + places, total.to(y.dtype.element_ty), mask=inside)


def append_normed(
    entry: Tensor, gain: Tensor, bias: Tensor, eps: float, entries: Tensor, weights: Tensor, row: int, first: int
) -> Tensor:
    """:func:`append_row` of LN(*entry*), with the norm over the last dimension."""
    y, size = torch.empty_like(entry), entry.size(-1)
    with torch.cuda.device_of(entry):
        _append_normed[(entry.numel() // size,)](
            entry, gain, bias, entries, weights, y, row, first, size, entry.numel(), eps,
            WIDE=_wide(entry), **_width(size),
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["row", "first"])
def _pull_normed(grad, entry, gain, grads, weights, d_entry, sums, row, first, rows, size, values, eps,
                 WIDTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    program, places = tl.program_id(0), tl.arange(0, WIDTH)
    inside = places < size
    factor_of = tl.load(gain + places, mask=inside, other=0.0).to(WIDE)
    d_gain, d_bias = tl.zeros([WIDTH], dtype=WIDE), tl.zeros([WIDTH], dtype=WIDE)
    for position in range(program, rows, tl.num_programs(0)):
        at = tl.cast(position, tl.int64) * size
        new = tl.load(grad + at + places, mask=inside, other=0.0)
        tl.store(grads + tl.cast(row, tl.int64) * values + at + places, new, mask=inside)
        total = tl.load(weights + row) * new.to(WIDE)
        total = _add_rows(total, grads + at + places, weights, first, row, values, inside, WIDE)
        normed, factor = _normed(entry + at, places, inside, size, eps, WIDE)
        value = _through_norm(total, normed, factor, factor_of, inside, size)
        tl.store(d_entry + at + places, value.to(d_entry.dtype.element_ty), mask=inside)
        d_gain, d_bias = d_gain + total * normed, d_bias + total
    tl.store(sums + program * 2 * size + places, d_gain, mask=inside)
    tl.store(sums + program * 2 * size + size + places, d_bias, mask=inside)


def pull_normed(
    grad: Tensor, entry: Tensor, gain: Tensor, eps: float, grads: Tensor, weights: Tensor, row: int, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of *entry*, *gain* and the bias of :func:`append_normed`.

    Args:
        grad: the gradient of x, contiguous; it becomes row *row* of *grads*
        grads: the gradients of later rows, first; R x M
        weights: R, of the rows of *grads*
    """
    size = entry.size(-1)
    rows, d_entry = entry.numel() // size, torch.empty_like(entry)
    programs, wide = min(rows, PROGRAMS), torch.promote_types(entry.dtype, torch.float32)
    sums = torch.empty(programs, 2, size, dtype=wide, device=entry.device)
    with torch.cuda.device_of(entry):
        _pull_normed[(programs,)](
            grad, entry, gain, grads, weights, d_entry, sums, row, first, rows, size, entry.numel(), eps,
            WIDE=_wide(entry), **_width(size),
        )  # fmt: skip
    d_gain, d_bias = sums.sum(0).to(gain.dtype).unbind(0)
    return d_entry, d_gain, d_bias


@triton.jit
def _gate(x, weight, bias, places, inside, size, eps, WIDE: tl.constexpr):
    """The input of a gate, normalised and after the sigmoid, and the factor of its norm."""
    normed, factor = _normed(x, places, inside, size, eps, WIDE)
    gain = tl.load(weight + places, mask=inside, other=0.0).to(WIDE)
    shift = tl.load(bias + places, mask=inside, other=0.0).to(WIDE)
    return normed, 1.0 / (1.0 + tl.exp(-(normed * gain + shift))), factor, gain


@triton.jit
def _cell_forward(x, weight, bias, h, old, out, cell, size, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = places < size
    x += 3 * row * size
    _, i, _, _ = _gate(x, weight, bias, places, inside, size, eps, WIDE)
    _, f, _, _ = _gate(x + size, weight + size, bias + size, places, inside, size, eps, WIDE)
    _, o, _, _ = _gate(x + 2 * size, weight + 2 * size, bias + 2 * size, places, inside, size, eps, WIDE)
    hidden = tl.load(h + row * size + places, mask=inside, other=0.0).to(WIDE)
    before = tl.load(old + row * size + places, mask=inside, other=0.0).to(WIDE)
    now = before * f + hidden * i
    tl.store(cell + row * size + places, now.to(cell.dtype.element_ty), mask=inside)
    tl.store(out + row * size + places, (now * o).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(d_gate, gate, normed, factor, gain, d_x, places, inside, size):
    """Store the gradient of a gate's input; return the gradient of the sigmoid's input."""
    d_z = d_gate * gate * (1.0 - gate)
    value = _through_norm(d_z, normed, factor, gain, inside, size)
    tl.store(d_x + places, value.to(d_x.dtype.element_ty), mask=inside)
    return d_z


@triton.jit
def _cell_backward(x, weight, bias, h, old, d_out, d_cell, d_x, d_h, d_old, sums, rows, size, eps,
                   WIDTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    first, places = tl.program_id(0), tl.arange(0, WIDTH)
    inside = places < size
    zeros = tl.zeros([WIDTH], dtype=WIDE)
    gain_i, gain_f, gain_o, shift_i, shift_f, shift_o = zeros, zeros, zeros, zeros, zeros, zeros
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        own = x + 3 * row * size
        n_i, i, r_i, g_i = _gate(own, weight, bias, places, inside, size, eps, WIDE)
        n_f, f, r_f, g_f = _gate(own + size, weight + size, bias + size, places, inside, size, eps, WIDE)
        n_o, o, r_o, g_o = _gate(own + 2 * size, weight + 2 * size, bias + 2 * size, places, inside, size, eps, WIDE)
        at = row * size + places
        hidden = tl.load(h + at, mask=inside, other=0.0).to(WIDE)
        before = tl.load(old + at, mask=inside, other=0.0).to(WIDE)
        upper = tl.load(d_out + at, mask=inside, other=0.0).to(WIDE)
        total = tl.load(d_cell + at, mask=inside, other=0.0).to(WIDE) + upper * o
        tl.store(d_h + at, (total * i).to(d_h.dtype.element_ty), mask=inside)
        tl.store(d_old + at, (total * f).to(d_old.dtype.element_ty), mask=inside)
        to = d_x + 3 * row * size
        z_i = _gate_backward(total * hidden, i, n_i, r_i, g_i, to, places, inside, size)
        z_f = _gate_backward(total * before, f, n_f, r_f, g_f, to + size, places, inside, size)
        z_o = _gate_backward(upper * (before * f + hidden * i), o, n_o, r_o, g_o, to + 2 * size, places, inside, size)
        gain_i, gain_f, gain_o = gain_i + z_i * n_i, gain_f + z_f * n_f, gain_o + z_o * n_o
        shift_i, shift_f, shift_o = shift_i + z_i, shift_f + z_f, shift_o + z_o
    sums += first * 6 * size + places
    tl.store(sums, gain_i, mask=inside)
    tl.store(sums + size, gain_f, mask=inside)
    tl.store(sums + 2 * size, gain_o, mask=inside)
    tl.store(sums + 3 * size, shift_i, mask=inside)
    tl.store(sums + 4 * size, shift_f, mask=inside)
    tl.store(sums + 5 * size, shift_o, mask=inside)


def cell_forward(x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, cell: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Out and Cell of the depth-wise LSTM; see :func:`fairseq_deep.core.aggregators.lstm_cell.gated_cell`.

    Args:
        x: inputs of the gates before their norms, ... x 3C, contiguous
        weight, bias: of the norms, 3 x C
        h, cell: ... x C, contiguous
    """
    out, new, size = torch.empty_like(h), torch.empty_like(cell), h.size(-1)
    with torch.cuda.device_of(x):
        _cell_forward[(h.numel() // size,)](
            x, weight, bias, h, cell, out, new, size, eps, WIDE=_wide(x), **_width(size)
        )
    return out, new


def cell_backward(
    x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, cell: Tensor, d_out: Tensor, d_cell: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the first five arguments of :func:`cell_forward`."""
    size = h.size(-1)
    rows = h.numel() // size
    programs, wide = min(rows, PROGRAMS), torch.promote_types(x.dtype, torch.float32)
    made = [torch.empty_like(each) for each in (x, h, cell)]
    sums = torch.empty(programs, 2, 3, size, dtype=wide, device=x.device)
    with torch.cuda.device_of(x):
        _cell_backward[(programs,)](
            x, weight, bias, h, cell, d_out, d_cell, *made, sums, rows, size, eps,
            WIDE=_wide(x), **_width(size),
        )  # fmt: skip
    d_weight, d_bias = sums.sum(0).to(weight.dtype).unbind(0)
    return made[0], d_weight, d_bias, made[1], made[2]
