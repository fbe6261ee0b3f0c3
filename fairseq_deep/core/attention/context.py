"""Inputs shared by all layers of a stack in one forward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fairseq_deep.core.native.steps import NativeStep

from .beams import DecodingStep
from .value_residual import FirstValues


class LayerContext(NamedTuple):
    """Inputs of a layer, and of its attentions, other than the hidden states.

    Attributes:
        memory: S x B x C, the encoder output that the layer attends to; None without a source
        memory_padding: B x S, true where *memory* is padding, or its additive form (:func:`padding_bias`)
        cache: keys, values and sums of incremental decoding; None for whole sentences
        mask: added to the scores of self-attention, T x T or B x 1 x T x T
        padding: B x T, true where the stack's own positions are padding, or its additive form; None without padding
        causal: positions see no later ones, without a *mask* that hides them
        step: inputs shared by the attentions of a decoding step, from :class:`SharedBeamState`
        values: the values of the first self-attention, with value residual
        native: the step in compiled kernels; None for torch's operations
        languages: indices of the target languages, B, which norms may depend on
    """

    memory: Tensor | None = None
    memory_padding: Tensor | None = None
    cache: dict | None = None
    mask: Tensor | None = None
    padding: Tensor | None = None
    causal: bool = False
    step: DecodingStep | None = None
    values: FirstValues | None = None
    native: NativeStep | None = None
    languages: Tensor | None = None

    @property
    def hides_later(self) -> bool:
        """Whether positions of the stack see no later ones; any *mask* is treated as causal."""
        return self.causal or self.mask is not None
