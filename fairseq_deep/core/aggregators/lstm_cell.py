"""Gates and cell of the depth-wise LSTM, Eq. (2) to (4), (7) and (8) of :mod:`.lstm`, in few passes over memory.

With z the normed inputs of the gates, s = sigmoid(z) = (i, f, o) and * the element-wise product,

    Cell = Cell' * f + h * i,   Out = Cell * o

where Cell' is the cell of the previous step. For the gradients dOut and dCell (of the cell in the next step)

    g = dCell + dOut * o                              the total gradient of Cell
    dh = g * i,   dCell' = g * f
    ds = (g * h, g * Cell', dOut * Cell),   dz = ds * s * (1 - s)

Autograd would compute a separate product for every factor, then copy the three parts of ds together. This
implementation writes them into one tensor, and saves only s, h, Cell' and Cell.
"""


import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.gpu import find_kernels

EPS = 1e-5  # of torch's layer norm


def norm_gates(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a layer norm over the features of each gate, with separate weights per gate.

    Args:
        x: T x B x 3C
        weight, bias: 3 x C

    Returns:
        T x B x 3 x C
    """
    x = x.view(x.size(0), x.size(1), 3, weight.size(1))
    return torch.addcmul(bias, F.layer_norm(x, (weight.size(1),)), weight)


def _forward(z: Tensor, h: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = torch.sigmoid(z)
    i, f, o = gates.unbind(2)
    cell = torch.mul(cell, f).addcmul_(h, i)
    return cell * o, cell, gates


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, h: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        out, cell, gates = _forward(z, h, old)
        ctx.save_for_backward(gates, h, old, cell)
        return out, cell

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, d_cell: Tensor):
        gates, h, old, cell = ctx.saved_tensors
        total = torch.addcmul(d_cell, d_out, gates.select(2, 2))
        d_z = torch.empty_like(gates)
        for index, (grad, factor) in enumerate(((total, h), (total, old), (d_out, cell))):
            torch.mul(grad, factor, out=d_z.select(2, index))
        torch.ops.aten.sigmoid_backward.grad_input(d_z, gates, grad_input=d_z)
        d_h, d_old = (total.unsqueeze(2) * gates[:, :, :2]).unbind(2)
        return d_z, d_h, d_old


def lstm_cell(z: Tensor, h: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return Out and Cell after one step.

    Args:
        z: normed inputs of input, forget and output gate, T x B x 3 x C
        h: the hidden computation, T x B x C
        cell: the cell of the previous step, T x B x C
    """
    if not is_compiling():  # a compiler generates its own kernels from the formula
        return _Cell.apply(z, h, cell)
    out, cell, _ = _forward(z, h, cell)
    return out, cell


class _FusedCell(torch.autograd.Function):
    """Norms of the gates and the cell in one kernel; its backward pass computes them again."""

    @staticmethod
    def forward(ctx, kernels, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = tuple(each.contiguous() for each in inputs)
        ctx.kernels = kernels
        ctx.save_for_backward(*inputs)
        return kernels.cell_forward(*inputs, EPS)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, d_cell: Tensor):
        return None, *ctx.kernels.cell_backward(*ctx.saved_tensors, d_out.contiguous(), d_cell.contiguous(), EPS)


def gated_cell(x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return Out and Cell after one step.

    Args:
        x: inputs of the gates before their norms, T x B x 3C
        weight, bias: of the norms, 3 x C
        h: the hidden computation, T x B x C
        cell: the cell of the previous step, T x B x C
    """
    kernels = find_kernels(x, weight, bias, h, cell)
    if kernels is not None and h.size(-1) <= kernels.WIDEST:
        return _FusedCell.apply(kernels, x, weight, bias, h, cell)
    return lstm_cell(norm_gates(x, weight, bias), h, cell)
