"""Base class of modules that replace a decoder's self-attention by a state of constant size."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError

from .beam_reorder import IncrementalState
from .beams import DecodingStep


class TargetAttention(nn.Module):
    """Reads the earlier positions of the target: all at once, or one by one in incremental decoding.

    Attributes:
        method: its name for ``--decoder-attn``
        full_context: positions can also see later ones
        reads_memory: :meth:`forward` also takes ``memory`` and ``memory_padding``, the memory of the layer
    """

    method = ""
    full_context = False
    reads_memory = False

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        step: DecodingStep | None = None,
        causal: bool = False,
        **memory: Any,
    ) -> tuple[Tensor, None]:
        """Attend; the arguments are the same as for self-attention in :class:`MultiheadAttention`.

        Args:
            query: T x B x C
            key_padding_mask: B x T, true where *query* is padding
            attn_mask: any mask is treated as causal
            incremental_state: stores the state of earlier positions; the call adds *query* (one position)
            step: output of :class:`SharedBeamState` in incremental decoding, replaces *key_padding_mask*
            causal: no position sees later ones

        Returns:
            T x B x C, and None

        Raises:
            UsageError: neither *causal* nor *attn_mask* hides later positions, which the method cannot see
        """
        if incremental_state is not None:
            assert step is not None, "incremental decoding requires the output of SharedBeamState"
            return self.next(query, incremental_state, step, **memory), None
        causal = causal or attn_mask is not None
        if not (causal or self.full_context):
            raise UsageError(f"--decoder-attn {self.method} does not see later positions: omit full_context_alignment")
        return self.whole(query, key_padding_mask, causal, **memory), None

    def whole(self, x: Tensor, padding: Tensor | None, causal: bool, **memory: Any) -> Tensor:
        """Return the outputs (T x B x C) for all positions *x* (T x B x C); *padding*: B x T, or None."""
        raise NotImplementedError

    def next(self, x: Tensor, state: IncrementalState, step: DecodingStep, **memory: Any) -> Tensor:
        """Return the output (1 x B x C) for the next position *x* (1 x B x C), and update *state*."""
        raise NotImplementedError
