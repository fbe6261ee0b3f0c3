"""Comparison of an export with its model: sentences, scores and translations."""

from __future__ import annotations

import glob
import operator
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_deep.errors import UsageError

from .bundle import Bundle
from .dictionary import Dictionary
from .loading import LoadedModel
from .text import TextSteps

BATCH, DRAWN, LONGEST = 16, 16, 12
"""Sentences per batch; number and maximum length of random sentences, which are used without text."""
RANDOM = "random units"
"""The origin of sentences drawn from the dictionary."""


class Report(NamedTuple):
    """Result of a comparison.

    Attributes:
        measure: the compared values, such as "logits"
        sentences: number of sentences
        difference: maximum difference
        equal: number of equal translations; None if none were compared
    """

    measure: str
    sentences: int
    difference: float
    equal: int | None = None

    def __str__(self) -> str:
        found = f"{self.measure} of {self.sentences} sentences within {self.difference:.1e}"
        return found if self.equal is None else f"{found}, {self.equal} of {self.sentences} translations equal"


class Side(NamedTuple):
    """One of two models in a comparison.

    Attributes:
        translate: returns the tokens of the best translation of each item in a batch, with end-of-sentence
        score: returns scores of given translations of a batch, in one tensor
    """

    translate: Callable[[Sequence[Any]], list[list[int]]]
    score: Callable[[Sequence[Any], list[list[int]]], Tensor]


class Limits(NamedTuple):
    """Limits of a comparison.

    Attributes:
        difference: limit of the maximum difference of scores, relative to the largest score if that is above 1
        mean: limit of their mean difference instead; None: see *difference*
        share: share of translations that must be equal; None: any. One may always differ, since rounding decides
            between hypotheses with nearly equal scores
        same: whether two translations are equal
    """

    difference: float
    mean: float | None = None
    share: float | None = None
    same: Callable[[list[int], list[int]], bool] = operator.eq


@torch.inference_mode()
def compare(
    program: str, measure: str, ours: Side, theirs: Side, items: Sequence[Any], limits: Limits, real: bool = True
) -> Report:
    """Compare *theirs*, the export for *program*, with *ours*, the model, on the same sentences.

    Args:
        measure: the compared scores, such as "logits"
        items: the sentences, in the form that both sides accept
        real: whether the sentences are real; otherwise translations are not compared

    Raises:
        UsageError: the results differ by more than rounding
    """
    differences, scale, equal = [torch.zeros(0)], 1.0, 0
    for batch in batches(sorted(items, key=lambda item: -len(item))):
        best = ours.translate(batch)
        expected, found = ours.score(batch, best), theirs.score(batch, best)
        differences.append((found - expected).abs().flatten())
        scale = max(scale, float(expected.abs().max()))
        equal += sum(map(limits.same, best, theirs.translate(batch))) if real else 0
    difference = torch.cat(differences)
    report = Report(measure, len(items), float(difference.max()), equal if real else None)
    if limits.mean is not None:
        if not difference.mean() <= limits.mean:  # true for NaN
            raise UsageError(f"{program}: {measure} differ from the model's (by {difference.mean():.1e} on average)")
    elif not report.difference <= limits.difference * scale:
        raise UsageError(f"{program}: {measure} differ from the model's (by up to {report.difference:.1e})")
    unequal = report.sentences - equal
    if real and limits.share is not None and unequal > max(1, (1 - limits.share) * report.sentences):
        raise UsageError(f"{program}: translations differ from the model's for {unequal} of {len(items)} sentences")
    return report


def logits_of(model: Any, source: Tensor, targets: list[list[int]]) -> Tensor:
    """Return our *model*'s logits for the tokens of *targets*, tokens x V."""
    inputs = shifted(targets)
    return model(source, None, inputs)[0].float()[inputs.ne(Dictionary.pad)]


def shifted(targets: list[list[int]]) -> Tensor:
    """Return the decoder's inputs for *targets*, which begin with end-of-sentence."""
    return padded([[Dictionary.eos, *target[:-1]] for target in targets])


def sentences(
    bundle: Bundle, loaded: LoadedModel, steps: TextSteps, count: int, given: Sequence[str] | None = None
) -> tuple[str, list[str]]:
    """Return the origin of the sentences and their tokenised text: up to twice *count*, since some may be too long.

    Args:
        given: the name of a file and its lines; None: the recipe's test set. Without a test set there are no sentences,
            and the origin is ``RANDOM``
    """
    name, *lines = given or _test_set(bundle, loaded.source_lang) or [RANDOM]
    raw = [line for line in lines if line.strip()][: 2 * count]
    return os.path.basename(name), [steps.tokenize(line) for line in raw]


def token_rows(
    bundle: Bundle,
    loaded: LoadedModel,
    steps: TextSteps,
    count: int,
    longest: int,
    given: Sequence[str] | None = None,
) -> tuple[str, list[list[int]]]:
    """Return the origin and the tokens of at most *count* sentences; without text, the sentences are random.

    Args:
        longest: maximum number of tokens per sentence
        given: see :func:`sentences`

    Raises:
        UsageError: the *given* file has no sentence that is short enough
    """
    origin, texts = sentences(bundle, loaded, steps, count, given)
    rows = [loaded.source.encode(steps.cut(text) if steps.cut else text).tolist() for text in texts]
    rows = [row for row in rows if 1 < len(row) <= longest][:count]
    if given and not rows:
        raise UsageError(f"{origin} has no sentence of at most {longest} tokens to check the export with")
    return (origin, rows) if rows else (RANDOM, _random_rows(loaded.source, longest)[:count])


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


def _random_rows(source: Dictionary, longest: int) -> list[list[int]]:
    """Return sentences of random tokens, identical at each call."""
    draws = random.Random(1)
    words = range(Dictionary.unk + 1, len(source)) or [Dictionary.unk]
    lengths = [draws.randint(1, max(1, min(LONGEST, longest - 1))) for _ in range(DRAWN)]
    return [[*draws.choices(words, k=length), source.eos] for length in lengths]


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield parts of *items* of batch size."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return *rows* as one tensor, with padding on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[Dictionary.pad] * (width - len(row))] for row in rows])
