"""Sampling of candidates, and tokens that may not be repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import SearchOptions


def draw(logs: Tensor, scores: Tensor, options: SearchOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each hypothesis; at the first step, ``beam`` tokens per sentence.

    Args:
        logs: log-probabilities, (sentences * hypotheses) x V
        scores: sentences x hypotheses, added to the log-probabilities

    Returns:
        scores, tokens and ranks, sentences x beam each
    """
    sentences, hypotheses = scores.shape
    best, words = logs.sort(dim=1, descending=True, stable=True)
    probabilities = best.exp()
    if options.sampling_topp > 0:  # the fewest tokens that reach p together
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.sampling_topp, 0.0)
    elif options.sampling_topk > 0:
        probabilities[:, options.sampling_topk :] = 0.0
    # an ended hypothesis that fills the beam may have no token left: its score is then -inf
    probabilities[:, 0] += probabilities.sum(1).eq(0)
    drawn = torch.multinomial(probabilities, options.beam // hypotheses, replacement=True)
    ranks = torch.arange(hypotheses, device=logs.device).repeat_interleave(options.beam // hypotheses)
    ranks = ranks.expand(sentences, -1)
    values = best.gather(1, drawn).view(sentences, -1) + scores.gather(1, ranks)
    return values, words.gather(1, drawn).view(sentences, -1), ranks


def repeated(words: list[int], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram of *size* that is already in *words*."""
    last = words[len(words) - size + 1 :] if size > 1 else []
    starts = range(len(words) - size + 1)
    return [words[start + size - 1] for start in starts if words[start : start + size - 1] == last]


def forbid_repeats(logits: Tensor, rows: list[list[int]], size: int) -> None:
    """Set the scores of the tokens of :func:`repeated` to -inf in *logits*, in place, one row per hypothesis."""
    for row, words in enumerate(rows):
        banned = repeated(words, size)
        if banned:
            logits[row, banned] = -torch.inf
