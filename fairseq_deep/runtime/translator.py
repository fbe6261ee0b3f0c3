"""Translation of raw text with one model or an ensemble."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import torch
from torch import Tensor

from fairseq_deep.core.fields import Range, check_fields
from fairseq_deep.core.registry import nearest
from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from .bundle import Bundle, find_bundle, search_of
from .engines import open_engine

RULES = {
    **{name: Range(1) for name in ("batch_size", "max_tokens", "nbest", "parallel")},
    "precision": ("fp32", "bf16", "int8"),
}
"""Ranges and names of the arguments of :class:`Translator`."""


@dataclass(frozen=True)
class Translation:
    """One hypothesis: raw text and its log-probability (base 2) / length^lenpen, as printed by fairseq-generate."""

    text: str
    score: float


class Translator:
    """Beam search with one model, or with an ensemble of models that share dictionaries and sub-words.

    Args:
        models: a path for :func:`find_bundle`, or a :class:`Bundle`; a list of these is an ensemble
        precision: precision of linear layers on a CPU, "fp32", "bf16" or "int8"
        batch_size, max_tokens: maximum number of sentences, and of tokens with padding, per batch
        cpu: do not use a GPU
        nbest: hypotheses per sentence
        parallel: batches that CTranslate2 translates at once; they share torch's threads
        decoding: fields of :class:`SearchOptions` (default: as in the first model's experiment)

    Attributes:
        engine: the engine of the model's format; see `engines`
        options: search options
        facts: see :class:`ModelFacts`
        on_batch: called after each batch with its number of sentences
        tokens, unknown: tokens of the sources until now, and how many of them the dictionary lacks

    Raises:
        UsageError: a model cannot be loaded, an argument is invalid or unknown, the models cannot form an ensemble, or
            their format does not support a request
    """

    def __init__(
        self,
        models: str | os.PathLike | Bundle | Sequence[str | os.PathLike | Bundle],
        precision: str = "fp32",
        batch_size: int = 64,
        max_tokens: int = 4000,
        cpu: bool = False,
        nbest: int = 1,
        parallel: int = 1,
        **decoding: Any,
    ):
        settings = {"precision": precision, "batch_size": batch_size, "max_tokens": max_tokens, "cpu": cpu,
                    "nbest": nbest, "parallel": parallel}  # fmt: skip
        check_fields(settings, Translator.__init__, RULES)
        known = [field.name for field in fields(SearchOptions)]
        for name in decoding:
            if name not in known:
                raise UsageError(f"unknown search option {name}{nearest(name, known)}; choose from {', '.join(known)}")
        self.batch_size, self.max_tokens, self.precision = batch_size, max_tokens, precision
        paths = [models] if isinstance(models, (str, os.PathLike, Bundle)) else models
        bundles = [path if isinstance(path, Bundle) else find_bundle(os.fspath(path)) for path in paths]
        if not bundles:
            raise UsageError("Translator requires a model: give the directory of a recipe, a package, or a checkpoint")
        bundle = bundles[0]
        self.options = SearchOptions(**{**search_of(bundle), "gnmt_lenpen": bundle.gnmt_lenpen, **decoding})
        self.nbest = min(nbest, self.options.beam)
        device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
        self.engine = open_engine(bundles, self.options, precision, device, parallel)
        self.source, self.target, self.facts = self.engine.source, self.engine.target, self.engine.facts
        self.source_lang, self.target_lang = self.engine.languages
        self.on_batch: Callable[[int], Any] = lambda sentences: None
        self.tokens = self.unknown = 0
        self.device, self.max_source = self.engine.device, self.facts.max_source
        self.text = bundle.text_steps(*self.engine.languages, self.source)

    @property
    def models(self) -> list[Transformer]:
        """The models of the torch engine; empty for other engines."""
        return self.engine.models

    @overload
    def translate(self, text: str) -> str: ...

    @overload
    def translate(self, text: Sequence[str]) -> list[str]: ...

    def translate(self, text):
        """Translate a string, or a list of strings, and return the best translations in the same form.

        Raises:
            UsageError: a sentence is not a string, or has more tokens than the models have positions; in this case
                nothing is translated
        """
        lines = [text] if isinstance(text, str) else list(text)
        found, encoded = self._encode(lines)
        for number, hypotheses in enumerate(found, 1):
            if not hypotheses and number - 1 not in encoded:
                problem = f"sentence {number} has more tokens than the model's {self.max_source} positions"
                raise UsageError(f"{problem}; split it, or use translate_nbest(), which skips it")
        best = [hypotheses[0].text for hypotheses in self._fill(found, encoded, 1)]
        return best[0] if isinstance(text, str) else best

    def translate_nbest(self, lines: Sequence[str], nbest: int | None = None) -> list[list[Translation]]:
        """Return the *nbest* hypotheses (default: the translator's) of each line with their scores, best first.

        An empty line has one empty hypothesis. A line with more tokens than the models have positions has none.

        Raises:
            UsageError: *lines* is one string, or an element is not a string
        """
        if isinstance(lines, str):
            raise UsageError("translate_nbest() takes a list of strings, not a string; put it in a list")
        check_fields({"nbest": nbest}, Translator.translate_nbest, RULES)
        return self._fill(*self._encode(list(lines)), self.nbest if nbest is None else min(nbest, self.options.beam))

    def _encode(self, lines: Sequence[str]) -> tuple[list[list[Translation]], dict[int, Tensor]]:
        """Return the hypotheses that need no search, for each line, and the tokens of the lines to search."""
        found: list[list[Translation]] = [[] for _ in lines]
        encoded = {}
        for number, line in enumerate(lines):
            if not isinstance(line, str):
                raise UsageError(f"sentence {number + 1} is of type {type(line).__name__}; it must be a string")
            units = self.text.prepare(line)
            tokens = self.source.encode(units)
            self.tokens += len(tokens) - 1
            self.unknown += int(tokens.eq(self.source.unk).sum())
            if not units:
                found[number] = [Translation("", 0.0)]
            elif len(tokens) <= self.max_source:
                encoded[number] = tokens
        return found, encoded

    def _fill(self, found: list[list[Translation]], encoded: dict[int, Tensor], nbest: int) -> list[list[Translation]]:
        batches = list(self._batches(encoded))
        sentences = ([encoded[number] for number in numbers] for numbers in batches)
        for numbers, results in zip(batches, self.engine.translate(sentences, nbest)):
            for number, hypotheses in zip(numbers, results):
                found[number] = [self._finish(each) for each in hypotheses[:nbest]]
            self.on_batch(len(numbers))
        return found

    def _batches(self, encoded: dict[int, Tensor]) -> Iterator[list[int]]:
        """Yield batches of line numbers with similar lengths; the longest come first, to detect memory errors early."""
        batch: list[int] = []
        for number in sorted(encoded, key=lambda each: -len(encoded[each])):
            full = batch and len(encoded[batch[0]]) * (len(batch) + 1) > self.max_tokens
            if full or len(batch) == self.batch_size:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _finish(self, hypothesis: dict[str, Tensor]) -> Translation:
        text = self.text.finish(self.target.decode(hypothesis["tokens"].tolist()))
        return Translation(text, float(hypothesis["score"]) / math.log(2))
