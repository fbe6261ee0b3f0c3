"""Sentences that an export is compared with its model on, and what the comparison has found."""

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
"""Sentences of a batch; random sentences, where there is no text, and the most words of each."""
RANDOM = "random units"
"""The origin of sentences that are drawn from the dictionary."""


class Report(NamedTuple):
    """What the comparison has found.

    Attributes:
        measure: what was compared, such as "logits"
        sentences: number of sentences
        difference: greatest difference
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
        """Return how many translations differ if fewer than *share* of them are equal, otherwise "".

        One may always differ: rounding decides between hypotheses of nearly equal scores.
        """
        unequal = 0 if self.equal is None else self.sentences - self.equal
        return f"{unequal} of {self.sentences} sentences" if unequal > max(1, (1 - share) * self.sentences) else ""


def sentences(
    bundle: Bundle, loaded: LoadedModel, steps: TextSteps, count: int, given: Sequence[str] | None = None
) -> tuple[str, list[str]]:
    """Return the origin of the sentences, and their tokenised text: twice *count*, since some may be too long.

    Args:
        given: the name of a file, and its lines; None: the recipe's test set. Without one there are no sentences, and
            the origin is ``RANDOM``
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
    """Return the origin of at most *count* sentences, and their tokens; random ones where there is no text.

    Args:
        longest: the most tokens of a sentence
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
    """Return the name of the recipe's test set and its lines; nothing if the model is not in a recipe's directory."""
    pattern = os.path.join(glob.escape(os.path.dirname(os.path.abspath(bundle.data))), "text/raw", f"test*.{language}")
    for path in sorted(glob.glob(pattern))[:1]:
        try:
            with open(path, encoding="utf-8") as stream:
                return [path, *stream.read().splitlines()]
        except (OSError, UnicodeDecodeError):
            break
    return []


def _random_rows(source: Dictionary, longest: int) -> list[list[int]]:
    """Return sentences of random words, the same at each call."""
    draws = random.Random(1)
    words = range(Dictionary.unk + 1, len(source)) or [Dictionary.unk]
    lengths = [draws.randint(1, max(1, min(LONGEST, longest - 1))) for _ in range(DRAWN)]
    return [[*draws.choices(words, k=length), source.eos] for length in lengths]


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield parts of *items*, each as many as a batch has sentences."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def padded(rows: Sequence[Sequence[int]], pad: int = Dictionary.pad) -> Tensor:
    """Return *rows* as one tensor, with padding on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
