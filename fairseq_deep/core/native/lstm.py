"""Depth-wise LSTM step in compiled kernels; equations in :mod:`..aggregators.lstm`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from .library import load
from .packed import pointer
from .structures import Built, Kept, LstmStruct, Unsupported, address, linear_struct, norm_struct

EPS = 1e-5  # in the gates' norms
_built = Built()


class NativeLstm:
    """Step of a depth-wise LSTM between two layers in compiled kernels, for the 2-layer form with a sigmoid GLU.

    Args:
        hidden, gates: its parts

    Raises:
        Unsupported: the kernels do not support these parts
    """

    def __init__(self, hidden: nn.Module, gates: nn.Module):
        if hidden.fc2 is None or hidden.glu != "sigmoid" or hidden.training or hidden.dropout.apply_during_inference:
            raise Unsupported
        self._kept: Kept = []
        parts = (linear_struct(linear, self._kept) for linear in (hidden.fc1, hidden.fc2, gates))
        weights = (address(weight, self._kept) for weight in (gates.norm_weight, gates.norm_bias))
        self.struct = LstmStruct(*parts, norm_struct(hidden.layer_norm, self._kept), *weights, EPS)
        self._run = load().lstm_step

    def __call__(self, out: Tensor, attention: Tensor, cell: Tensor) -> list[Tensor]:
        """Return Out and Cell after the step (1 x B x C); *attention*: 1 x B x C or wider."""
        made = torch.empty(out.shape), torch.empty(cell.shape)
        rows, threads = ctypes.c_int64(out.size(1)), ctypes.c_int64(torch.get_num_threads())
        out, attention, cell = out.contiguous(), attention.contiguous(), cell.contiguous()
        inputs = pointer(out), pointer(attention), ctypes.c_int64(attention.size(2)), pointer(cell)
        self._run(ctypes.byref(self.struct), *inputs, *map(pointer, made), rows, threads)
        return list(made)


def find_lstm(hidden: nn.Module, gates: nn.Module) -> NativeLstm | None:
    """Return the LSTM's step; None if the kernels do not support it.

    It is kept with *hidden*, which always has the same *gates*, and rebuilt if a weight is packed again or replaced.
    """
    linears = (hidden.fc1, hidden.fc2, gates)
    parts = [getattr(linear, name, None) for linear in linears for name in ("native", "bias")]
    norms = (getattr(hidden.layer_norm, name, None) for name in ("weight", "bias"))
    parts += [gates.norm_weight, gates.norm_bias, *norms, hidden.training, hidden.dropout.apply_during_inference]
    return _built.get(hidden, parts, lambda: NativeLstm(hidden, gates))
