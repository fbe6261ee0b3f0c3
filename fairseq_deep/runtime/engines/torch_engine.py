"""Beam search with our models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.search import BeamSearch, SearchOptions

from ..loading import LoadedModel, ModelFacts

Hypotheses = list[list[dict[str, Tensor]]]
"""Hypotheses of each sentence, best first, with "tokens" (including end-of-sentence) and "score" (in nats)."""


class TorchEngine:
    """Engine for one model or an ensemble, on a CPU or a GPU.

    Args:
        loaded: the models, which are prepared for decoding in place
        options: search options
        precision: precision of linear layers on a CPU, "fp32", "bf16" or "int8"
        device: device of the models
    """

    name = "torch"

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
        """Yield the hypotheses of each batch; a batch is a list of sentences, a sentence a vector of tokens."""
        return map(self.translate_batch, batches)

    def translate_batch(self, sentences: Sequence[Tensor], longest: int = 0) -> Hypotheses:
        """Return the hypotheses of *sentences*, with length limits for a batch at least *longest* tokens wide."""
        return self.search(self.pad(sentences, longest).to(self.device))

    def pad(self, sentences: Sequence[Tensor], longest: int = 0) -> Tensor:
        """Return *sentences* as a batch, padded as in training, at least *longest* tokens wide."""
        longest = max(longest, *map(len, sentences))
        batch = torch.full((len(sentences), longest), self.source.pad)
        for row, tokens in zip(batch, sentences):
            start = longest - len(tokens) if self.facts.pads_left else 0
            row[start : start + len(tokens)] = tokens
        return batch
