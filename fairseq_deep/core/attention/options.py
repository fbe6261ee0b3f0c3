"""Options of attentions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class AttentionOptions:
    """Options of :class:`MultiheadAttention`.

    Attributes:
        dropout: probability of dropout on the attention weights
        bias: whether the four projections have a bias
        relative_positions: the clipping distance K of relative positions (self-attention only); None for none
        relative_values: relative positions also have vectors for the values
        causal: no position sees later ones, which then need no relative positions
        kv_heads: number of heads of keys and values, a divisor of the number of heads; None: the same number
        rotary: positions that the table of rotations has room for (self-attention only); None for no rotations
        qk_norm: normalise queries and keys
        gate: gate the output per head ("heads") or per feature ("features"); None for no gate
        output_norm: the norm of the output of the heads; None for none
        value_residual: the values of the first layer are added to its own (self-attention only)
    """

    dropout: float = 0.0
    bias: bool = True
    relative_positions: int | None = None
    relative_values: bool = False
    causal: bool = False
    kv_heads: int | None = None
    rotary: int | None = None
    qk_norm: bool = False
    gate: str | None = None
    output_norm: nn.Module | None = None
    value_residual: bool = False


PLAIN = AttentionOptions()
"""The defaults."""
