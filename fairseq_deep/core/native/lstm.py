"""Depth-wise LSTM step in compiled kernels; equations in :mod:`..aggregators.lstm`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from .library import load
from .packed import pointer
from .structures import Kept, LstmStruct, Unsupported, linear_struct, norm_struct

EPS = 1e-5  # in the gates' norms


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
        weights = gates.norm_weight.data_ptr(), gates.norm_bias.data_ptr()
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

    The step is stored with the packed weights of the gates, and rebuilt if any of its weights are packed again.
    """
    packed = [getattr(part, "native", None) for part in (hidden.fc1, hidden.fc2)]
    kept = gates.native.partners.get(hidden)
    if kept is None or any(one is not other for one, other in zip(kept[0], packed)):
        try:
            kept = packed, NativeLstm(hidden, gates)
        except Unsupported:
            kept = packed, None
        gates.native.partners[hidden] = kept
    return kept[1]
