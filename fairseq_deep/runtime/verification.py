"""Comparison of an export with its model: sentences, log-probabilities and translations."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.errors import UsageError

from .bundle import Bundle
from .dictionary import SPECIAL, Dictionary
from .loading import LoadedModel
from .text import TAG, TextSteps, joined

BATCH, DRAWN, LONGEST = 16, 16, 12
"""Sentences per batch; number of random sentences, which are used without text, and their maximum number of words."""
RANDOM = "random units"
"""The origin of sentences drawn from the dictionary."""


class Report(NamedTuple):
    """Result of a comparison.

    Attributes:
        sentences: number of sentences
        difference: maximum difference of log-probabilities
        equal: number of equal translations; None if none were compared
    """

    sentences: int
    difference: float
    equal: int | None = None

    def __str__(self) -> str:
        found = f"log-probabilities of {self.sentences} sentences within {self.difference:.1e}"
        return found if self.equal is None else f"{found}, {self.equal} of {self.sentences} translations equal"


class Limits(NamedTuple):
    """Limits of a comparison.

    Attributes:
        difference: limit of the maximum difference of log-probabilities, relative to the largest one if that is above 1
        mean: limit of their mean difference instead; None: see *difference*
        share: share of translations that must be equal; None: any. One may always differ, since rounding decides
            between hypotheses with nearly equal scores
        own_search: whether both sides run our search; then translations at the length limit must also be equal, and
            translations of random sentences are compared
    """

    difference: float
    mean: float | None = None
    share: float | None = None
    own_search: bool = False


class Reference:
    """Our model as one side of a comparison: ``translate`` as in an engine, and ``log_probabilities``.

    Args:
        model: the model, or another one with its interface
        options: search options
    """

    def __init__(self, model: Any, options: SearchOptions):
        self.model, self.search = model, BeamSearch([model], options)

    def translate(self, batches: Iterable[Sequence[Tensor]]) -> Iterator[list[list[dict[str, Tensor]]]]:
        """Yield the hypotheses of each batch."""
        return map(self.search, map(padded, batches))

    def log_probabilities(self, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the log-probabilities at all tokens of *targets*, tokens x V."""
        inputs = shifted(targets)
        return normalised(self.model(padded(sentences), None, inputs)[0][inputs.ne(Dictionary.pad)])


@torch.inference_mode()
def compare(
    program: str, ours: Any, theirs: Any, rows: Sequence[Tensor], limits: Limits, real: bool = True,
    their_rows: Sequence[Tensor] | None = None,
) -> Report:  # fmt: skip
    """Compare *theirs*, the export for *program*, with *ours*, the model, on the same sentences.

    Args:
        ours: a :class:`Reference`, whose options limit the length by "max_len_b" only
        theirs: the same, or an engine with ``log_probabilities``, which may be only of the targets' tokens
        rows: tokens of the sentences
        real: whether the sentences are text
        their_rows: *rows* in the export's own indices; None: the same

    Raises:
        UsageError: the results differ by more than rounding
    """
    differences, scale, equal, translated = [torch.zeros(0)], 1.0, 0, real or limits.own_search
    longest = ours.search.options.max_len_b
    pairs = sorted(zip(rows, their_rows or rows), key=lambda pair: -len(pair[0]))
    for start in range(0, len(pairs), BATCH):
        own, other = zip(*pairs[start : start + BATCH])
        best = _best(ours, own)
        expected, found = ours.log_probabilities(own, best), theirs.log_probabilities(other, best)
        if found.dim() == 1:
            expected = expected.gather(1, torch.cat(best).unsqueeze(1)).squeeze(1)
        else:
            found = found[:, : expected.size(1)]  # an export may have more rows, which are never generated
        differences.append((found - expected).abs().flatten())
        scale = max(scale, float(expected.abs().max()))
        both = zip(best, _best(theirs, other)) if translated else ()
        equal += sum(a.equal(b) or not limits.own_search and min(len(a), len(b)) > longest for a, b in both)
    difference = torch.cat(differences)
    report = Report(len(rows), float(difference.max()), equal if translated else None)
    if limits.mean is not None:
        if not difference.mean() <= limits.mean:  # true for NaN
            by = f"{difference.mean():.1e} on average"
            raise UsageError(f"{program}: log-probabilities differ from the model's (by {by})")
    elif not report.difference <= limits.difference * scale:
        raise UsageError(f"{program}: log-probabilities differ from the model's (by up to {report.difference:.1e})")
    unequal = len(rows) - equal
    if translated and limits.share is not None and unequal > max(1, (1 - limits.share) * len(rows)):
        raise UsageError(f"{program}: translations differ from the model's for {unequal} of {len(rows)} sentences")
    return report


def _best(engine: Any, batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the tokens of the best hypotheses of a batch."""
    return [hypotheses[0]["tokens"].cpu() for hypotheses in next(iter(engine.translate([batch])))]


def normalised(logits: Tensor) -> Tensor:
    """Return the log-probabilities without the one of padding, which is never generated: it is 0."""
    pad = torch.tensor([Dictionary.pad])
    return logits.float().index_fill(-1, pad, -torch.inf).log_softmax(-1).index_fill(-1, pad, 0.0)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return *rows* as one tensor, with padding on the right."""
    return torch.nn.utils.rnn.pad_sequence([*rows], True, Dictionary.pad)


def shifted(targets: Sequence[Tensor]) -> Tensor:
    """Return the decoder's inputs for *targets*, which begin with end-of-sentence."""
    return padded([torch.cat([target.new_tensor([Dictionary.eos]), target[:-1]]) for target in targets])


def sentences(
    bundle: Bundle, loaded: LoadedModel, steps: TextSteps, count: int, longest: int, given: Sequence[str] | None = None
) -> tuple[str, Sequence[str], Sequence[Tensor]]:
    """Return the origin of at most *count* sentences, their tokenised text, and their tokens.

    Args:
        longest: maximum number of tokens per sentence
        given: the name of a file and its lines; None: the recipe's test set, or random sentences without one

    Raises:
        UsageError: the *given* file has no sentence that is short enough
    """

    def short(texts: Iterable[str]) -> list[tuple[str, Tensor]]:
        pairs = ((text, loaded.source.encode(steps.cut(text) if steps.cut else text)) for text in texts)
        return [(text, row) for text, row in pairs if 1 < len(row) <= longest]

    origin, *lines = given or _test_set(bundle, loaded.source_lang) or [RANDOM]
    raw = [line for line in lines if line.strip()][: 2 * count]  # some may be too long
    found = short(map(steps.tokenize, raw))
    if given and not found:
        raise UsageError(f"{os.path.basename(origin)} has no sentence of at most {longest} tokens to check it with")
    if not found:
        origin, count = RANDOM, min(count, DRAWN)
        found = short(_random_texts(loaded.source, steps.kind, longest))
    texts, rows = zip(*found[:count])
    return os.path.basename(origin), texts, rows


def _test_set(bundle: Bundle, language: str) -> list[str]:
    """Return the name of the recipe's test set and its lines; empty if the model is not in a recipe's directory."""
    pattern = os.path.join(glob.escape(os.path.dirname(os.path.abspath(bundle.data))), "text/raw", f"test*.{language}")
    for path in sorted(glob.glob(pattern))[:1]:
        try:
            with open(path, encoding="utf-8") as stream:
                return [path, *stream.read().splitlines()]
        except (OSError, UnicodeDecodeError):
            break
    return []


def _random_texts(source: Dictionary, kind: str | None, longest: int) -> Iterator[str]:
    """Yield tokenised text of random entries of the dictionary *source*, without tags, identical at each call."""
    draws, first = random.Random(1), len(SPECIAL)
    words = [symbol for symbol in source.symbols[first:] if not TAG.fullmatch(symbol)] or [SPECIAL[Dictionary.unk]]
    for _ in range(8 * DRAWN):  # some may be too long after they are cut again
        length = draws.randint(1, max(1, min(LONGEST, longest - 1)))
        yield joined(" ".join(draws.choices(words, k=length)), kind or "subword-nmt")
