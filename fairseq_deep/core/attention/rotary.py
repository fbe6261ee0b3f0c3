"""Rotary positions: queries and keys are rotated by angles proportional to their position.

RoFormer: Enhanced Transformer with Rotary Position Embedding, Su et al., 2021, Section 3.2. For a head of width D, with
w_i = 10000^(-2i/D) for i = 0 ... D/2 - 1, the features i and i + D/2 at position t become

    x_i'       = x_i cos(t w_i) - x_(i+D/2) sin(t w_i)
    x_(i+D/2)' = x_(i+D/2) cos(t w_i) + x_i sin(t w_i)

The paper's Eq. 34 pairs neighbouring features 2i and 2i + 1. We pair halves, like GPT-NeoX and Llama: the same method
with the features in another order. The score of a query and a key depends only on their distance, so positions may
count padding on the left.

Names here: ``table`` holds cos(t w) and sin(t w), the latter with the signs of the equations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotations(length: int, dim: int) -> Tensor:
    """Return cos and signed sin of the positions 0 ... *length* - 1: 2 x length x dim, in fp64."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)])


class RotaryPositions(nn.Module):
    """Rotates queries and keys of one width.

    Args:
        dim: width D, even
        length: initial number of positions in the table
    """

    def __init__(self, dim: int, length: int):
        super().__init__()
        self.dim = dim
        # one row more: torch.export assumes that a dynamic slice is never the whole table
        self.register_buffer("table", rotations(length + 1, dim).float(), persistent=False)

    def _apply(self, fn, *others):
        """Convert the module; a table in fp64 has all its digits, not those of fp32."""
        super()._apply(fn, *others)
        if self.table.dtype == torch.float64:
            self.table = rotations(self.table.size(1), self.dim).to(self.table)
        return self

    def forward(self, x: Tensor, position: int | Tensor | None = None) -> Tensor:
        """Rotate.

        Args:
            x: ... x T x D
            position: the position of all rows of *x*, as a number or a tensor (1); None for 0 ... T-1

        Returns:
            the same shape
        """
        cos, sin = self._chosen(x, position).to(x.dtype).unbind(0)
        return torch.addcmul(x * cos, x.roll(self.dim // 2, -1), sin)

    def _chosen(self, x: Tensor, position: int | Tensor | None) -> Tensor:
        """Return the rotations of the rows of *x*: 2 x T x D or 2 x 1 x D."""
        if isinstance(position, Tensor):
            return self.table.index_select(1, position)
        return self.at(0, x.size(-2)) if position is None else self.at(position)

    def at(self, first: int, rows: int = 1) -> Tensor:
        """Return cos and signed sin of the positions *first* ... *first* + *rows* - 1: 2 x rows x D."""
        table = self.table  # another thread may replace it
        if first + rows > table.size(1):
            table = self.table = rotations(2 * (first + rows), self.dim).to(table)
        return table[:, first : first + rows]
