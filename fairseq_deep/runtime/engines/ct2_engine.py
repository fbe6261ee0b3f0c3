"""Beam search with CTranslate2, with the best hypotheses of our own search.

Both searches find the same best hypothesis, except in these cases (``src/decoding.cc`` of CTranslate2). Our engine
translates such sentences again:

- a hypothesis is longer than allowed: fairseq ends it with ``</s>``, CTranslate2 with any token. In this case the best
  hypothesis is too long;
- a hypothesis is empty: fairseq excludes ``</s>`` as the first token after the softmax, CTranslate2 before it.
  Therefore CTranslate2 may return it here (``min_decoding_length=0``), which keeps scores exact;
- a source has special symbols, such as ``<pad>``.

If more hypotheses end in a step than are missing, CTranslate2 ranks all of them, and fairseq only the first ones. Then
only hypotheses after the best one differ. Scores do not include the probability of ``<pad>``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions

from ..dictionary import Dictionary
from ..loading import ModelFacts
from .torch_engine import Hypotheses, TorchEngine

COMPUTED = {"fp32": "float32", "int8": "int8"}
"""CTranslate2's types of weights by our names of precisions."""
SAME = ("beam", "max_len_a", "max_len_b", "lenpen", "limit_each")
"""Search options that CTranslate2 supports."""
NO_PENALTY = 1e-9
"""Length penalty instead of 0; with exactly 0, CTranslate2 ends the search by another rule."""


def find_problem(options: SearchOptions, nbest: int, precision: str) -> str:
    """Return the option of a search that CTranslate2 does not support, "" if it supports all."""
    if nbest > 1:
        return "several hypotheses per sentence, which CTranslate2 ranks differently"
    if precision not in COMPUTED:
        return f"--decode-precision {precision}, which CTranslate2 does not support"
    if options.gnmt_lenpen:
        return "GNMT's length penalty, which CTranslate2 does not support"
    for field in fields(SearchOptions):
        if field.name not in SAME and getattr(options, field.name) != field.default:
            return f"the search option {field.name}, which CTranslate2 does not support in the same way"
    return ""


class Ct2Engine:
    """Engine for a converted model.

    Args:
        folder: directory of the model in CTranslate2's format
        facts: see :class:`ModelFacts`
        dictionaries: source and target dictionary
        languages: source and target language
        options: search options
        fallback: returns our own engine, for sentences on which the searches differ
        threads: total number of threads
        parallel: number of batches translated at once; they share the threads

    Attributes:
        note: origin of the model
        received: number of sentences to translate
        reasons: number of sentences that our own engine has translated, by reason
    """

    name = "ctranslate2"

    def __init__(
        self,
        folder: str,
        facts: ModelFacts,
        dictionaries: Sequence[Dictionary],
        languages: Sequence[str],
        options: SearchOptions,
        fallback: Callable[[], TorchEngine],
        threads: int = 1,
        parallel: int = 1,
    ):
        self.note, self.facts, self.options, self.models = "", facts, options, []
        self.received, self.reasons = 0, Counter[str]()
        self.source, self.target = dictionaries
        self.languages, self.device = tuple(languages), torch.device("cpu")
        self._make_fallback, self._fallback = fallback, None
        parallel = min(parallel, threads)
        self.translator = _quietly_opened(folder, inter_threads=parallel, intra_threads=threads // parallel)

    @property
    def by_torch(self) -> int:
        """Number of sentences that our own engine has translated."""
        return self.reasons.total()

    @property
    def fallback(self) -> TorchEngine:
        """The torch engine, loaded on first use."""
        if self._fallback is None:
            self._fallback = self._make_fallback()
        return self._fallback

    def translate(self, batches: Iterable[Sequence[Tensor]], nbest: int = 1) -> Iterator[Hypotheses]:
        """See :class:`TorchEngine`. CTranslate2 is used only for 1-best output with a large enough vocabulary."""
        if nbest > 1 or 2 * self.options.beam >= len(self.target):
            reason = "several hypotheses" if nbest > 1 else "beam too large for the dictionary"
            for sentences in batches:
                self.received += len(sentences)
                self.reasons[reason] += len(sentences)
                yield self.fallback.translate_batch(sentences)
            return
        started = [(sentences, *self._start(sentences)) for sentences in batches]
        for sentences, longest, results in started:
            self.received += len(sentences)
            yield self._finish(sentences, longest, [result.result() for result in results])

    def _start(self, sentences: Sequence[Tensor]) -> tuple[int, list[Any]]:
        """Return the maximum number of tokens, and the pending results."""
        options, longest = self.options, self._limit(max(map(len, sentences)))
        return longest, self.translator.translate_batch(
            [self._words(tokens) for tokens in sentences],
            beam_size=options.beam,
            num_hypotheses=options.beam,
            length_penalty=options.lenpen or NO_PENALTY,
            min_decoding_length=0,
            max_decoding_length=longest + 1,  # with </s>
            max_input_length=0,
            return_scores=True,
            asynchronous=True,
        )

    def _limit(self, length: int) -> int:
        """Return the maximum number of target tokens for a source of *length* tokens."""
        return min(int(self.options.max_len_a * length + self.options.max_len_b), self.facts.max_target - 1)

    def _words(self, tokens: Tensor) -> list[str]:
        return [self.source.symbols[index] for index in tokens[:-1].tolist()]

    def _finish(self, sentences: Sequence[Tensor], longest: int, results: Sequence[Any]) -> Hypotheses:
        found: Hypotheses = []
        differ = []
        for number, (tokens, result) in enumerate(zip(sentences, results)):
            reason = self._difference(tokens, longest, result)
            if reason:
                self.reasons[reason] += 1
                differ.append(number)
            found.append([self._hypothesis(result)])
        if differ:
            width = max(map(len, sentences))
            again = self.fallback.translate_batch([sentences[number] for number in differ], width)
            for number, hypotheses in zip(differ, again):
                found[number] = hypotheses
        return found

    def _difference(self, tokens: Tensor, longest: int, result: Any) -> str:
        """Return the reason why our search may find another hypothesis; "" if it finds the same."""
        if has_symbols(tokens):
            return "special symbols"
        limit = self._limit(len(tokens)) if self.options.limit_each else longest
        # with limits per sentence, any hypothesis beyond the limit shows that our search would have ended earlier
        if max(map(len, result.hypotheses if limit < longest else result.hypotheses[:1])) > limit:
            return "length limit"
        return "empty candidate" if [] in result.hypotheses else ""

    def _hypothesis(self, result: Any) -> dict[str, Tensor]:
        words = [self.target.indices[word] for word in result.hypotheses[0]]
        return {"tokens": torch.tensor([*words, self.target.eos]), "score": torch.tensor(result.scores[0])}

    def log_probabilities(self, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probabilities of the tokens of *targets*, which end with end-of-sentence."""
        words = [[self.target.symbols[index] for index in tokens[:-1].tolist()] for tokens in targets]
        results = self.translator.score_batch([self._words(each) for each in sentences], words, max_input_length=0)
        return [torch.tensor(result.log_probs) for result in results]


def _quietly_opened(folder: str, **settings: int) -> Any:
    """Return the translator in *folder*; CTranslate2's warning about a conversion of types is suppressed."""
    import ctranslate2

    level = ctranslate2.get_log_level()
    ctranslate2.set_log_level(logging.ERROR)
    try:
        return ctranslate2.Translator(folder, **settings)
    finally:
        ctranslate2.set_log_level(level)


def has_symbols(tokens: Tensor) -> bool:
    """Return whether a source has special symbols before its end-of-sentence."""
    return bool((tokens[:-1] < Dictionary.unk).any())
