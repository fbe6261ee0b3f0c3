"""Raw text through one model, or an ensemble of several, to raw text."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import torch
from torch import Tensor

from fairseq_deep.core.decoding import decode_in
from fairseq_deep.core.registry import nearest
from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.errors import UsageError

from .bundle import Bundle, find_bundle, search_of
from .files import sha256
from .loading import LoadedModel, load_model
from .text import TextSteps


@dataclass(frozen=True)
class Translation:
    """One hypothesis: raw text, and its log-probability (base 2) over length^lenpen, as fairseq-generate prints it."""

    text: str
    score: float


class Translator:
    """Beam search with one model, or with an ensemble of models that share dictionaries and sub-words.

    Args:
        models: a path, as :func:`find_bundle` takes it, or a :class:`Bundle`; a list of these is an ensemble
        precision: the decoder's matrix products on a CPU, "fp32", "bf16" or "int8"
        batch_size, max_tokens: most sentences, and most tokens with padding, in a batch
        cpu: do not use a GPU
        nbest: hypotheses per sentence
        decoding: fields of :class:`SearchOptions`; by default those of the first model's experiment

    Raises:
        UsageError: a model cannot be loaded, an option is unknown, or the models do not belong together
    """

    def __init__(
        self,
        models: str | os.PathLike | Bundle | Sequence[str | os.PathLike | Bundle],
        precision: str = "fp32",
        batch_size: int = 64,
        max_tokens: int = 4000,
        cpu: bool = False,
        nbest: int = 1,
        **decoding: Any,
    ):
        known = [field.name for field in fields(SearchOptions)]
        for name in decoding:
            if name not in known:
                raise UsageError(f"unknown search option {name}{nearest(name, known)}; choose from {', '.join(known)}")
        self.batch_size, self.max_tokens = batch_size, max_tokens
        paths = [models] if isinstance(models, (str, os.PathLike, Bundle)) else models
        bundles = [path if isinstance(path, Bundle) else find_bundle(os.fspath(path)) for path in paths]
        if not bundles:
            raise UsageError("Translator has no model: give the directory of a recipe, a package, or a checkpoint")
        loaded = [load_model(bundle) for bundle in bundles]
        first, bundle = loaded[0], bundles[0]
        for other, its_bundle in zip(loaded[1:], bundles[1:]):
            _check_same(other, its_bundle, first, bundle)
        self.source, self.target = first.source, first.target
        self.source_lang, self.target_lang = first.source_lang, first.target_lang
        self.arch = getattr(first.stored.flags, "arch", None)
        self.parameters = sum(weights.numel() for each in loaded for weights in each.model.parameters())
        self.pads_left = first.stored.task.get("left_pad_source") is not False
        self.text = TextSteps(first.source_lang, first.target_lang, bundle.codes, bundle.tokenizer, bundle.lowercase)
        options = SearchOptions(**{**search_of(bundle), "gnmt_lenpen": bundle.gnmt_lenpen, **decoding})
        self.nbest = min(nbest, options.beam)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        self.models = [each.model.to(self.device).prepare_for_decoding() for each in loaded]
        for model in self.models:
            decode_in(model, precision)
        self.search = BeamSearch(self.models, options)
        limits = [each.stored.task.get("max_source_positions") or math.inf for each in loaded]
        self.max_source = int(min(*limits, *(model.encoder.max_positions() for model in self.models)))

    @overload
    def translate(self, text: str) -> str: ...

    @overload
    def translate(self, text: Sequence[str]) -> list[str]: ...

    def translate(self, text):
        """Translate a string to a string, or a list of strings to the list of their best translations.

        Raises:
            UsageError: a sentence is not a string, or has more tokens than the models have positions; nothing is
                translated
        """
        lines = [text] if isinstance(text, str) else list(text)
        found, encoded = self._encode(lines)
        for number, hypotheses in enumerate(found, 1):
            if not hypotheses and number - 1 not in encoded:
                problem = f"sentence {number} has more tokens than the model's {self.max_source} positions"
                raise UsageError(f"{problem}; split it, or use translate_nbest(), which skips it")
        best = [hypotheses[0].text for hypotheses in self._fill(found, encoded)]
        return best[0] if isinstance(text, str) else best

    def translate_nbest(self, lines: Sequence[str]) -> list[list[Translation]]:
        """Return the *nbest* hypotheses of each line with their scores, best first.

        An empty line has one empty hypothesis. A line with more tokens than the models have positions has none.

        Raises:
            UsageError: *lines* is one string, or an element is not a string
        """
        if isinstance(lines, str):
            raise UsageError("translate_nbest() takes a list of strings, not a string; put it in a list")
        return self._fill(*self._encode(lines))

    def _encode(self, lines: Sequence[str]) -> tuple[list[list[Translation]], dict[int, Tensor]]:
        """Return the hypotheses that need no search, for each line, and the tokens of the lines to search."""
        found: list[list[Translation]] = [[] for _ in lines]
        encoded = {}
        for number, line in enumerate(lines):
            if not isinstance(line, str):
                raise UsageError(f"sentence {number + 1} is of type {type(line).__name__}; it must be a string")
            units = self.text.prepare(line)
            tokens = self.source.encode(units)
            if not units:
                found[number] = [Translation("", 0.0)]
            elif len(tokens) <= self.max_source:
                encoded[number] = tokens
        return found, encoded

    def _fill(self, found: list[list[Translation]], encoded: dict[int, Tensor]) -> list[list[Translation]]:
        for numbers in self._batches(encoded):
            for number, hypotheses in zip(numbers, self._search([encoded[number] for number in numbers])):
                found[number] = [self._finish(each) for each in hypotheses[: self.nbest]]
        return found

    def _batches(self, encoded: dict[int, Tensor]) -> Iterator[list[int]]:
        """Lines of like lengths, the longest first: what does not fit into memory shows at once."""
        batch: list[int] = []
        longest = 0
        for number in sorted(encoded, key=lambda each: -len(encoded[each])):
            longest = max(longest, len(encoded[number]))
            if batch and (len(batch) == self.batch_size or longest * (len(batch) + 1) > self.max_tokens):
                yield batch
                batch, longest = [], len(encoded[number])
            batch.append(number)
        if batch:
            yield batch

    def _search(self, sentences: list[Tensor]) -> list[list[dict[str, Tensor]]]:
        """Hypotheses of the *sentences*, each a vector of tokens."""
        longest = max(map(len, sentences))
        batch = torch.full((len(sentences), longest), self.source.pad)
        for row, tokens in zip(batch, sentences):
            start = longest - len(tokens) if self.pads_left else 0
            row[start : start + len(tokens)] = tokens
        return self.search(batch.to(self.device))

    def _finish(self, hypothesis: dict[str, Tensor]) -> Translation:
        text = self.text.finish(self.target.decode(hypothesis["tokens"].tolist()))
        return Translation(text, float(hypothesis["score"]) / math.log(2))


def _check_same(loaded: LoadedModel, bundle: Bundle, first: LoadedModel, first_bundle: Bundle) -> None:
    """Reject a model that does not belong into an ensemble with the *first*."""
    for side in ("source", "target"):
        if getattr(loaded, side) != getattr(first, side):
            path = f"{bundle.data}/dict.{getattr(loaded, f'{side}_lang')}.txt"
            problem = f"{path} is not the dictionary of {first_bundle.checkpoint}"
            raise UsageError(f"{problem}: an ensemble shares dictionaries")
    differs = [name for name in ("tokenizer", "lowercase") if getattr(bundle, name) != getattr(first_bundle, name)]
    sums = [sha256(each.codes) if each.codes else None for each in (bundle, first_bundle)]
    differs += ["sub-words"] if sums[0] != sums[1] else []
    if differs:
        raise UsageError(
            f"{bundle.checkpoint} has its text prepared otherwise than {first_bundle.checkpoint} "
            f"({', '.join(differs)}): an ensemble shares that"
        )
