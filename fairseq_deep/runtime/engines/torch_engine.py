"""Beam search with our own models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.search import BeamSearch, SearchOptions

from ..loading import LoadedModel, ModelFacts

Hypotheses = list[list[dict[str, Tensor]]]
"""For each sentence its hypotheses, best first: "tokens" with end-of-sentence, and "score" in nats."""


class TorchEngine:
    """One model or an ensemble, on a CPU or a GPU.

    Args:
        loaded: the models, which are prepared for decoding in place
        options: of the search
        precision: the decoder's matrix products on a CPU, "fp32", "bf16" or "int8"
        device: of the models

    Attributes:
        note: why this engine was chosen; "" if it was asked for
        by_torch: number of sentences that this engine translated in the place of another; 0 here
    """

    name, note, by_torch = "torch", "", 0

    def __init__(
        self, loaded: Sequence[LoadedModel], options: SearchOptions, precision: str = "fp32", device: str = "cpu"
    ):
        self.source, self.target = loaded[0].source, loaded[0].target
        self.languages = loaded[0].source_lang, loaded[0].target_lang
        self.facts, self.device = ModelFacts.of(loaded), torch.device(device)
        self.models = [each.model.to(self.device).prepare_for_decoding() for each in loaded]
        for model in self.models:
            decode_in(model, precision)
        self.search = BeamSearch(self.models, options)

    def translate(self, batches: Iterable[Sequence[Tensor]], nbest: int = 1) -> Iterator[Hypotheses]:
        """The hypotheses of each of the *batches*, which are lists of sentences, each a vector of tokens."""
        return map(self.translate_batch, batches)

    def translate_batch(self, sentences: Sequence[Tensor], longest: int = 0) -> Hypotheses:
        """The hypotheses of *sentences*, as if the longest of them had *longest* tokens, or more if one has."""
        return self.search(self.pad(sentences, longest).to(self.device))

    def pad(self, sentences: Sequence[Tensor], longest: int = 0) -> Tensor:
        """*sentences* as a batch, with padding as in training, and at least *longest* tokens wide."""
        longest = max(longest, *map(len, sentences))
        batch = torch.full((len(sentences), longest), self.source.pad)
        for row, tokens in zip(batch, sentences):
            start = longest - len(tokens) if self.facts.pads_left else 0
            row[start : start + len(tokens)] = tokens
        return batch
