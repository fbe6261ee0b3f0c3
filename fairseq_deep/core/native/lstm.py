"""Depth-wise LSTM step in compiled kernels; equations in :mod:`..aggregators.lstm`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from .library import load
from .packed import pointer
from .structures import Described, LstmStruct, Reads, Unsupported

EPS = 1e-5  # in the gates' norms


class NativeLstm:
    """Step of a depth-wise LSTM between two layers in compiled kernels, for the 2-layer form with a sigmoid GLU.

    Args:
        hidden, gates: its parts
        reads: notes the attributes that the kernels depend on

    Raises:
        Unsupported: the kernels do not support its parts
    """

    def __init__(self, hidden: nn.Module, gates: nn.Module, reads: Reads):
        if reads(hidden, "fc2") is None or reads(hidden, "glu") != "sigmoid" or reads(hidden, "training"):
            raise Unsupported
        if reads(reads(hidden, "dropout"), "apply_during_inference"):
            raise Unsupported
        parts = reads.linear(hidden, "fc1"), reads.linear(hidden, "fc2"), reads.packed(gates)
        weights = (reads.address(gates, name) for name in ("norm_weight", "norm_bias"))
        self._reads = reads  # owns the weights
        self.struct = LstmStruct(*parts, reads.norm(hidden, "layer_norm"), *weights, EPS)
        self._run = load().lstm_step

    def __call__(self, out: Tensor, attention: Tensor, cell: Tensor) -> list[Tensor]:
        """Return Out and Cell after the step (1 x B x C); *attention*: 1 x B x C or wider."""
        made = torch.empty(out.shape), torch.empty(cell.shape)
        rows, threads = ctypes.c_int64(out.size(1)), ctypes.c_int64(torch.get_num_threads())
        out, attention, cell = out.contiguous(), attention.contiguous(), cell.contiguous()
        inputs = pointer(out), pointer(attention), ctypes.c_int64(attention.size(2)), pointer(cell)
        self._run(ctypes.byref(self.struct), *inputs, *map(pointer, made), rows, threads)
        return list(made)


_described = Described(lambda hidden, reads, gates: NativeLstm(hidden, gates, reads))


def find_lstm(hidden: nn.Module, gates: nn.Module) -> NativeLstm | None:
    """Return the LSTM's step, if *hidden* always has the same *gates*; None if the kernels do not support it."""
    return _described(hidden, gates)
