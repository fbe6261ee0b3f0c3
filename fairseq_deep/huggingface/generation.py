"""Support for ``generate()``: the cache of the core's decoder, the package's search settings and length limit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.cache_utils import Cache

from fairseq_deep.core.decoding_state import DecodingState
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import Dictionary


class DecoderCache(Cache):
    """The incremental state of the core's decoder as a transformers cache.

    transformers' caches hold keys and values per layer. This cache also holds running means, and stores the keys of all
    hypotheses of a sentence together. Beam reordering therefore changes a mask instead of copying keys.

    Args:
        decoder: the core's decoder

    Attributes:
        state: the decoder's state; None before the first position
    """

    is_croppable = False

    def __init__(self, decoder: torch.nn.Module):
        super().__init__(layers=[])
        self.decoder = decoder
        self.reset()

    def reset(self) -> None:
        """Clear the cache."""
        self.state: DecodingState | None = None

    def extend(self, words: Tensor, encoded: dict[str, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """Decode one more position.

        Args:
            words: the newest token of each hypothesis, B
            encoded: the encoder's output

        Returns:
            features (B x 1 x C) and hidden states (1 x B x C each)
        """
        if self.state is None:
            self.state = DecodingState(self.decoder, self.decoder.read_source(encoded))
        x, extra = self.decoder.step_features(self.state, words, -1)
        return x, extra["inner_states"]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached target positions."""
        return 0 if self.state is None else self.state.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, since the cache has no maximum length."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the cache to the hypotheses *beam_idx*."""
        if self.state is not None:
            self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Reorder the cache to the hypotheses *indices*."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Reject search methods that expand the beam after the first step."""
        raise UsageError("this search copies hypotheses after the first step, which is not supported; use beam search")

    def crop(self, tokens_to_remove: int) -> None:
        """Reject search methods that remove positions."""
        raise UsageError("assisted decoding removes positions, which is not supported; omit the assistant")


class EndAtLimit(LogitsProcessor):
    """Allow only end-of-sentence, with its original score, after *longest* tokens, like fairseq."""

    def __init__(self, longest: int):
        self.longest = longest

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.size(1) <= self.longest:
            return scores
        limited = torch.full_like(scores, -math.inf)
        limited[:, Dictionary.eos] = scores[:, Dictionary.eos]
        return limited


LENGTHS = ("max_length", "max_new_tokens")
"""Limits of the length in transformers."""


class PackageSearch(GenerationConfig):
    """Search settings with a package's defaults instead of transformers'.

    ``Seq2SeqTrainer`` writes defaults into the model's settings; transformers' limit, 20 tokens, would cut texts.

    Attributes:
        ceiling: maximum number of tokens of the longest source, with the first symbol and end-of-sentence
        penalty: the package's length penalty, for a beam search with the package of a greedy search
    """

    ceiling: int
    penalty: float

    def _get_default_generation_params(self) -> dict[str, Any]:
        own = {"max_length": self.ceiling, "length_penalty": self.penalty, "early_stopping": True}
        return {**GenerationConfig._get_default_generation_params(), **own}


def search_settings(search: dict[str, Any], source: int, target: int) -> PackageSearch:
    """Return the search settings of a package, without GNMT's length penalty; :func:`check_penalty` rejects it.

    Args:
        search: the package's settings
        source, target: numbers of positions of encoder and decoder
    """
    ids = {"bos_token_id": Dictionary.bos, "pad_token_id": Dictionary.pad, "eos_token_id": Dictionary.eos}
    beam = {"num_beams": search["beam"], "length_penalty": search["lenpen"], "early_stopping": True}
    settings = PackageSearch(
        **ids, decoder_start_token_id=Dictionary.eos, suppress_tokens=[Dictionary.pad], min_new_tokens=1,
        **beam if search["beam"] > 1 else {},
    )  # fmt: skip
    settings.ceiling, settings.penalty = longest_of(search, source, target) + 2, search["lenpen"]
    return settings


def check_penalty(search: dict[str, Any], given: dict[str, Any]) -> None:
    """Reject a package's GNMT length penalty, unless the arguments override it.

    Args:
        search: the package's settings
        given: arguments of ``generate()``; another length penalty or a beam of 1 is accepted

    Raises:
        UsageError: the search requires GNMT's length penalty; the message names the alternatives
    """
    own = {"length_penalty", "generation_config"} & given.keys()
    if search["gnmt_lenpen"] and (given.get("num_beams") or search["beam"]) > 1 and not own:
        raise UsageError(
            "this model's search uses GNMT's length penalty, which transformers does not support: give generate() "
            "another length_penalty, or translate with fairseq_deep.runtime.Translator"
        )


def longest_of(search: dict[str, Any], source: int, positions: int) -> int:
    """Return the maximum number of target tokens, without end-of-sentence, as in the runtime's search.

    Args:
        source: number of source tokens in the batch, with padding
        positions: number of the decoder's positions
    """
    return min(int(search["max_len_a"] * source + search["max_len_b"]), positions - 1)
