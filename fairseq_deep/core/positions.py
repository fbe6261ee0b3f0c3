"""Absolute positions: fairseq's sinusoids for any length, or a learned table.

Attention Is All You Need, Vaswani et al., 2017, Section 3.5, in the order of fairseq and Tensor2Tensor. With h = C/2,
the position p has the features

    sin(p w_0) ... sin(p w_(h-1)), cos(p w_0) ... cos(p w_(h-1)),    w_i = 10000^(-i/(h-1))

Names here: a token's p is ``padding_idx`` plus its rank among the tokens that are not padding (1, 2, ...), for
compatibility with fairseq's checkpoints. The vector of padding is 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(rows: int, dim: int, padding_idx: int | None = None) -> Tensor:
    """Return features of the positions 0 ... *rows* - 1, rows x dim in fp32; zeros for *padding_idx*, if any."""
    half = dim // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(rows, dtype=torch.float).unsqueeze(1) * frequencies
    table = F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim % 2))
    if padding_idx is not None:
        table[padding_idx] = 0
    return table


def position_numbers(tokens: Tensor, padding_idx: int) -> Tensor:
    """Return the position p of each token, B x T; *padding_idx* for padding."""
    words = tokens.ne(padding_idx).to(torch.int32)
    return (words.cumsum(1, dtype=torch.int32) * words).long() + padding_idx


class SinusoidalPositions(nn.Module):
    """Fixed positions of any length.

    Args:
        dim: width C
        padding_idx: index of padding in the dictionary
        length: initial number of tokens in the table
    """

    max_positions = 100_000

    def __init__(self, dim: int, padding_idx: int, length: int):
        super().__init__()
        self.padding_idx = padding_idx
        self.register_buffer("_float_tensor", torch.zeros(1))  # not used: it is in fairseq's checkpoints
        self.register_buffer("weights", sinusoids(padding_idx + 1 + length, dim, padding_idx), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return positions of *tokens* (B x T), B x T x C."""
        return F.embedding(position_numbers(tokens, self.padding_idx), self._table(tokens.size(1)))

    def row(self, length: int) -> Tensor:
        """Return the position of the last of *length* tokens without padding, C."""
        return self._table(length)[self.padding_idx + length]

    def _table(self, length: int) -> Tensor:
        """Return features with room for *length* tokens."""
        rows, table = self.padding_idx + 1 + length, self.weights  # another thread may replace them
        if rows > table.size(0):
            table = self.weights = sinusoids(rows, table.size(1), self.padding_idx).to(table)
        return table


class LearnedPositions(nn.Embedding):
    """Learned vector for each position.

    Args:
        dim: width C
        padding_idx: index of padding in the dictionary
        length: number of positions
    """

    def __init__(self, dim: int, padding_idx: int, length: int):
        super().__init__(padding_idx + 1 + length, dim, padding_idx)
        self.max_positions = length
        nn.init.normal_(self.weight, std=dim**-0.5)
        nn.init.zeros_(self.weight[padding_idx])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return positions of *tokens* (B x T), B x T x C."""
        return super().forward(position_numbers(tokens, self.padding_idx))

    def row(self, length: int) -> Tensor:
        """Return the position of the last of *length* tokens without padding, C."""
        return self.weight[self.padding_idx + length]
