"""Sentences and results of a comparison between an export and its model."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterator, Sequence
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

    def differing(self, share: float) -> str:
        """Return the number of differing translations if fewer than *share* of them are equal, otherwise "".

        One translation may always differ, since rounding decides between hypotheses with nearly equal scores.
        """
        unequal = 0 if self.equal is None else self.sentences - self.equal
        return f"{unequal} of {self.sentences} sentences" if unequal > max(1, (1 - share) * self.sentences) else ""


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
