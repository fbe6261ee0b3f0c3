"""The candidates of a step: the best words, or words that are drawn; and what may not be repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import SearchOptions


def draw(logs: Tensor, scores: Tensor, options: SearchOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a word for each hypothesis, at the first step for each of the ``beam`` to come.

    Args:
        logs: log-probabilities, (sentences * hypotheses) x words
        scores: sentences x hypotheses, added to the score of each

    Returns:
        scores, words and ranks, sentences x beam each
    """
    sentences, hypotheses = scores.shape
    best, words = logs.sort(dim=1, descending=True, stable=True)
    probabilities = best.exp()
    if options.sampling_topp > 0:  # the first words that reach p together, with the one that does
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.sampling_topp, 0.0)
    elif options.sampling_topk > 0:
        probabilities[:, options.sampling_topk :] = 0.0
    # a hypothesis that has ended and goes on for want of others may have no word left: its score is -inf then
    probabilities[:, 0] += probabilities.sum(1).eq(0)
    drawn = torch.multinomial(probabilities, options.beam // hypotheses, replacement=True)
    ranks = torch.arange(hypotheses, device=logs.device).repeat_interleave(options.beam // hypotheses)
    ranks = ranks.expand(sentences, -1)
    values = best.gather(1, drawn).view(sentences, -1) + scores.gather(1, ranks)
    return values, words.gather(1, drawn).view(sentences, -1), ranks


def repeated(words: list[int], size: int) -> list[int]:
    """The words that would end an n-gram of *size* that occurs in *words* already."""
    last = words[len(words) - size + 1 :] if size > 1 else []
    starts = range(len(words) - size + 1)
    return [words[start + size - 1] for start in starts if words[start : start + size - 1] == last]


def forbid_repeats(logits: Tensor, rows: list[list[int]], size: int) -> None:
    """Hide in place, in the row of *logits* of each hypothesis, the words that :func:`repeated` names."""
    for row, words in enumerate(rows):
        banned = repeated(words, size)
        if banned:
            logits[row, banned] = -torch.inf
