"""State of incremental decoding: the encoded batch, caches, and the number of positions so far.

A search calls, for the newest token of each hypothesis and then for the hypotheses that continue::

    state = decoder.start(encoder_out)
    scores, weights = state.step(words)
    state.reorder(order)

fairseq's generator passes a dictionary of caches instead, and the whole prefix of each hypothesis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from .attention.luna import hidden_rows


class Source(NamedTuple):
    """The encoded batch, as the decoder reads it.

    Attributes:
        memory: S x B x C, the encoder output; None without a source
        padding: B x S, true where *memory* is padding; None if there is no mask
        memories: one memory per layer; empty if all layers attend to *memory*
        languages: indices of the target languages, B; None if nothing depends on them
    """

    memory: Tensor | None
    padding: Tensor | None
    memories: list[Tensor]
    languages: Tensor | None

    @classmethod
    def of(cls, encoded: dict[str, list[Tensor]], packs: bool) -> Source:
        """Return what a decoder reads of the encoder's dictionary; with *packs*, its memories are packed sources."""
        names = ("encoder_out", "encoder_padding_mask", "languages")
        memory, padding, languages = (encoded[name][0] if encoded.get(name) else None for name in names)
        memories = encoded.get("encoder_memories", [])
        if packs and padding is not None:
            padding = hidden_rows(padding, memories[0].size(0) // 2)
        return cls(memory, padding, memories, languages)


class DecodingState:
    """State of incremental decoding, with caches in torch's operations.

    Args:
        decoder: the decoder
        source: the encoded batch
        caches: state of each module by its key; None: the state before the first position
        length: number of positions so far
    """

    def __init__(self, decoder: nn.Module, source: Source, caches: dict[str, Any] | None = None, length: int = 0):
        self.decoder, self.source, self.length = decoder, source, length
        self.caches = {} if caches is None else caches

    def step(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Advance by one position.

        Args:
            words: the newest token of each hypothesis, B

        Returns:
            scores of all tokens (B x V), and attention weights (B x S) or None
        """
        x, extra = self.decoder.step_features(self, words)
        weights = extra["attn"][0]
        return self.decoder.output_layer(x)[:, -1], None if weights is None else weights[:, -1]

    def reorder(self, order: Tensor) -> None:
        """Continue with the hypotheses *order* (B)."""
        self.decoder.reorder_incremental_state_scripting(self.caches, order)

