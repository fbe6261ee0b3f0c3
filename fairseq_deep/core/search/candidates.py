"""Best candidates of a beam search step, without sorting or normalising the whole vocabulary.

The score of token w after hypothesis h is s_h + log p(w | h), where

    log p(w | h) = logit(h, w) - log sum_v exp logit(h, v)

The terms that do not depend on w are the *offset* of the hypothesis. The c best candidates of a sentence are in the c
blocks of tokens with the largest maxima over all its hypotheses. Maxima are fast to compute, and only these blocks need
a search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_deep.core.native import functions
from fairseq_deep.core.native.packed import runs_native

BLOCK = 64  # tokens


def log_normaliser(logits: Tensor) -> Tensor:
    """Return log sum_v exp logit(h, v), one value per row of *logits* (rows x V)."""
    if runs_native(logits) and logits.is_contiguous():
        return functions.log_normalisers(logits)
    return torch.logsumexp(logits, 1)


def best_candidates(logits: Tensor, offsets: Tensor, beam: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, tokens and hypothesis ranks of the best candidates, the best first.

    Args:
        logits: (sentences * beam) x V
        offsets: sentences x beam, added to the logits of each hypothesis
        beam: hypotheses per sentence
        count: candidates per sentence

    Returns:
        three tensors, sentences x count
    """
    rows, words = logits.shape
    sentences, blocks = rows // beam, words // BLOCK
    if blocks <= 2 * count:
        scores = (logits.view(sentences, beam, words) + offsets.unsqueeze(2)).flatten(1)
        values, places = scores.topk(count, dim=1)
        return values, places % words, places // words
    if runs_native(logits) and logits.is_contiguous():
        return functions.best_candidates(logits, offsets.contiguous(), beam, count)
    whole = logits[:, : blocks * BLOCK].view(sentences, beam, blocks, BLOCK)
    maxima = (whole.amax(dim=3) + offsets.unsqueeze(2)).flatten(1)
    best = maxima.topk(count, dim=1, sorted=False).indices
    ranks, first = best // blocks, best % blocks * BLOCK
    inside = torch.arange(BLOCK, device=logits.device)
    places = ((ranks * words + first).unsqueeze(2) + inside).flatten(1)
    scores = (logits.view(sentences, -1).gather(1, places).view(sentences, count, BLOCK)
              + offsets.gather(1, ranks).unsqueeze(2)).flatten(1)
    if blocks * BLOCK < words:  # the last tokens, an incomplete block
        rest = logits[:, blocks * BLOCK :].view(sentences, beam, -1) + offsets.unsqueeze(2)
        numbers = torch.arange(beam * words, device=logits.device).view(beam, words)[:, blocks * BLOCK :].flatten()
        scores = torch.cat([scores, rest.flatten(1)], dim=1)
        places = torch.cat([places, numbers.expand(sentences, -1)], dim=1)
    values, chosen = scores.topk(count, dim=1)
    places = places.gather(1, chosen)
    return values, places % words, places // words
