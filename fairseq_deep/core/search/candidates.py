"""The best candidates of a step of beam search, without sorting or normalising all words.

The score of word w after hypothesis h is s_h + log p(w | h), where

    log p(w | h) = logit(h, w) - log sum_v exp logit(h, v)

What does not depend on w is the hypothesis' *offset*. The c best of a sentence are in the c blocks of words with the
largest maxima over all of its hypotheses: maxima are quick to find, and of the rest only those blocks are looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # words
SUMS = 1e-18, 1e30  # sums of exponentials between these need no shift in fp32


def log_normaliser(logits: Tensor, buffer: Tensor | None = None) -> Tensor:
    """log sum_v exp logit(h, v), one value a row of *logits* (rows x words).

    Args:
        buffer: memory of the same shape that is written over, so that none is taken at each step
    """
    total = torch.exp(logits, out=buffer).sum(1)
    least, largest = total.aminmax()
    if SUMS[0] < float(least) and float(largest) < SUMS[1]:  # not so with NaN
        return total.log_()
    return torch.logsumexp(logits, 1)


def best_candidates(logits: Tensor, offsets: Tensor, beam: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, words and ranks of the hypotheses of the best candidates, the best first.

    Args:
        logits: (sentences * beam) x words
        offsets: sentences x beam, added to the logits of each hypothesis
        beam: hypotheses of a sentence
        count: candidates of a sentence

    Returns:
        three tensors, sentences x count
    """
    rows, words = logits.shape
    sentences, blocks = rows // beam, words // BLOCK
    if blocks <= 2 * count:
        scores = (logits.view(sentences, beam, words) + offsets.unsqueeze(2)).flatten(1)
        values, places = scores.topk(count, dim=1)
        return values, places % words, places // words
    whole = logits[:, : blocks * BLOCK].view(sentences, beam, blocks, BLOCK)
    maxima = (whole.amax(dim=3) + offsets.unsqueeze(2)).flatten(1)
    best = maxima.topk(count, dim=1, sorted=False).indices
    ranks, first = best // blocks, best % blocks * BLOCK
    inside = torch.arange(BLOCK, device=logits.device)
    places = ((ranks * words + first).unsqueeze(2) + inside).flatten(1)
    scores = (logits.view(sentences, -1).gather(1, places).view(sentences, count, BLOCK)
              + offsets.gather(1, ranks).unsqueeze(2)).flatten(1)
    if blocks * BLOCK < words:  # the last words, which are no whole block
        rest = logits[:, blocks * BLOCK :].view(sentences, beam, -1) + offsets.unsqueeze(2)
        numbers = torch.arange(beam * words, device=logits.device).view(beam, words)[:, blocks * BLOCK :].flatten()
        scores = torch.cat([scores, rest.flatten(1)], dim=1)
        places = torch.cat([places, numbers.expand(sentences, -1)], dim=1)
    values, chosen = scores.topk(count, dim=1)
    places = places.gather(1, chosen)
    return values, places % words, places // words
