"""Incremental decoding with one state vector per hypothesis, for modules that replace self-attention."""

import uuid

import torch
from torch import Tensor, nn

from .beam_reorder import BeamReorder, IncrementalState


class HypothesisState(nn.Module):
    """Stores one vector per hypothesis, independent of the number of positions; initially 0.

    Args:
        name: name of the vector in the key of the incremental state
        width: length of the vector; None for the width C of the stack
        counts_words: the module also needs the number of tokens so far
    """

    field = "vector"

    def __init__(self, name: str, width: int | None = None, counts_words: bool = False):
        super().__init__()
        self.width, self.counts_words = width, counts_words
        self._state = f"{uuid.uuid4()}.{name}"

    def previous(self, incremental_state: IncrementalState, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors (1 x B x C) of the position before *like* (1 x B x C)."""
        vector = incremental_state[self._state][self.field] if self._state in incremental_state else None
        return torch.zeros(like.shape, dtype=dtype, device=like.device) if vector is None else vector

    def keep(self, incremental_state: IncrementalState, vector: Tensor) -> None:
        """Store the *vector* of each hypothesis (1 x B x C) for the next position."""
        incremental_state[self._state] = {self.field: vector}

    def reorder(self, incremental_state: IncrementalState, order: BeamReorder) -> None:
        """Continue with the vectors of the hypotheses of *order*."""
        hypotheses = order.beam_indices
        if self._state in incremental_state and hypotheses is not None:
            vector = incremental_state[self._state][self.field]
            incremental_state[self._state][self.field] = vector.index_select(1, hypotheses)
