"""Sentences that an export is checked with before it gets its name."""

import argparse
import glob
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.runtime.text import TAG, joined
from fairseq_deep.tools import read_lines

BATCH, DRAWN, PAD = 16, 16, 1
RANDOM = "random units"
"""The origin of sentences that are drawn from the dictionary."""


def sentences(
    args: argparse.Namespace, loaded: Any, steps: Any, given: list[str] | None
) -> tuple[str, list[str]]:
    """Return where the sentences to check with are from, and their tokenised text.

    Args:
        args: of the command; the folder of a recipe has a test set
        loaded: the `LoadedModel`
        steps: its `TextSteps`
        given: the name of a file with sentences, and its lines; None: the recipe's test set, or random units
    """
    if given is None:
        pattern = os.path.join(args.checkpoint, "text/raw", f"test*.{loaded.source_lang}")
        found = sorted(glob.glob(glob.escape(os.path.dirname(pattern)) + os.sep + os.path.basename(pattern)))
        given = [found[0], *read_lines(found[0])] if found else None
    if given is None:
        return RANDOM, random_texts(loaded.source, steps.kind)
    raw = [line for line in given[1:] if line.strip()][: 2 * args.verify_sentences]
    return os.path.basename(given[0]), [steps.tokenize(line) for line in raw]


def random_texts(source: Any, kind: str | None, count: int = DRAWN) -> list[str]:
    """Return tokenised text of random entries of the dictionary *source*, without tags, the same at each call.

    Args:
        kind: of the sub-words, as in `TextSteps`
    """
    draws, words = random.Random(1), [symbol for symbol in source.symbols[4:] if not TAG.fullmatch(symbol)]
    lines = [draws.choices(words, k=draws.randint(2, 12)) for _ in range(count)]
    return [joined(" ".join(line), kind or "subword-nmt") for line in lines]


def batches(order: list[int]) -> Iterator[list[int]]:
    """Yield parts of *order*, each the numbers of a batch."""
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return *rows* as one tensor, with padding on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
