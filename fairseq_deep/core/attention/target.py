"""Base class of modules that replace a decoder's self-attention by a state of constant size."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError

from .context import LayerContext


class TargetAttention(nn.Module):
    """Reads the earlier positions of the target: all at once, or one by one in incremental decoding.

    Attributes:
        method: its name for ``--decoder-attn``
        full_context: positions can also see later ones
    """

    method = ""
    full_context = False

    def forward(self, x: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        """Attend, as :class:`MultiheadAttention` does.

        Args:
            x: T x B x C
            context: inputs of the layer; with a cache, *x* is one more position, whose state it stores

        Returns:
            T x B x C, and None

        Raises:
            UsageError: nothing hides later positions, which the method cannot see
        """
        if context.cache is not None:
            assert context.step is not None, "incremental decoding requires the output of SharedBeamState"
            return self.next(x, context), None
        if not (context.hides_later or self.full_context):
            raise UsageError(f"--decoder-attn {self.method} does not see later positions: omit full_context_alignment")
        return self.whole(x, context), None

    def whole(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return the outputs (T x B x C) for all positions *x* (T x B x C)."""
        raise NotImplementedError

    def next(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return the output (1 x B x C) for the next position *x* (1 x B x C), and update its cache."""
        raise NotImplementedError
