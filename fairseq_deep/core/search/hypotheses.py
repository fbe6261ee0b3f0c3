"""Bookkeeping of beam search with fairseq's rules, in numpy: hypotheses that continue, and hypotheses that end.

A step has 2 x beam candidates per sentence, the best first. An end-of-sentence among the first *beam* candidates ends
its hypothesis; the best *beam* other candidates continue. A sentence is finished when *beam* hypotheses have ended, or
at the maximum length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor


class Continuation(NamedTuple):
    """Hypotheses that continue in the next step.

    Attributes:
        order: their indices in the previous step (sentences * beam)
        words: the new token of each
    """

    order: Tensor
    words: Tensor


class Hypotheses:
    """Hypotheses of a batch.

    Args:
        sentences: number of sentences
        beam: number of hypotheses per sentence
        longest: maximum number of tokens, without end-of-sentence
        eos: index of end-of-sentence
        penalty: scores are divided by the length to the power of this; None: they are not
        lengths: maximum number of tokens of each sentence; longer hypotheses score -inf; None: *longest*
        limits: number of tokens after which the hypotheses of each sentence end; None: *longest*

    Attributes:
        scores: sentences x beam, sums of log-probabilities; before the first step, one hypothesis per sentence
        ended: tokens, log-probabilities and score of the ended hypotheses of each sentence
    """

    def __init__(
        self,
        sentences: int,
        beam: int,
        longest: int,
        eos: int,
        penalty: float | None = None,
        lengths: list[int] | None = None,
        limits: list[int] | None = None,
    ):
        self.beam, self.longest, self.eos, self.penalty, self.lengths = beam, longest, eos, penalty, lengths
        self.limits = numpy.array(limits or [longest] * sentences)
        self.step = 0
        self.numbers = numpy.arange(sentences)  # of the sentences that continue
        self.words = numpy.zeros((sentences, longest + 1), dtype=numpy.int64)
        self.sums = numpy.zeros((sentences, longest + 1), dtype=numpy.float32)
        self.out = numpy.zeros((sentences, beam), dtype=bool)  # ended already, kept to fill the beam
        self.attention: numpy.ndarray | None = None  # hypotheses x tokens x source, if there are weights
        self.ended: list[list[tuple]] = [[] for _ in range(sentences)]

    @property
    def scores(self) -> Tensor:
        count = len(self.numbers)
        if self.step == 0:
            return torch.zeros(count, 1)
        return torch.from_numpy(self.sums[:, self.step - 1].reshape(count, -1))

    @property
    def at_limit(self) -> numpy.ndarray:
        """Whether each of the sentences that continue must end at this step."""
        return self.limits[self.numbers] <= self.step

    def prefixes(self) -> list[list[int]]:
        """Return the tokens of each hypothesis so far."""
        return self.words[:, : self.step].tolist()

    def attend(self, weights: Tensor) -> None:
        """Store the attention weights of this step, hypotheses x source."""
        if self.attention is None:
            self.attention = numpy.zeros((len(weights), self.longest + 1, weights.size(1)), dtype=numpy.float32)
        self.attention[:, self.step] = weights.numpy()

    def advance(self, scores: Tensor, words: Tensor, ranks: Tensor) -> Continuation | None:
        """Advance by the candidates of a step (sentences x candidates each); return None if the search has ended."""
        scores, words = scores.numpy(), words.numpy()
        sentences, beam = len(self.numbers), self.beam
        before = len(self.words) // sentences  # hypotheses per sentence before this step
        parents = ranks.numpy() + numpy.arange(sentences)[:, None] * before
        ends = (words == self.eos) & (scores != -numpy.inf)
        ends[:, :beam] &= ~self.out
        going = self._finish(ends, scores, parents)
        if not going.any():
            return None
        if not going.all():
            stay = _fill_places(going)
            self.numbers, self.out = self.numbers[stay], self.out[stay]
            ends, scores, words, parents = ends[stay], scores[stay], words[stay], parents[stay]
        ends[:, :beam] |= self.out
        if not ends.any():  # the first *beam* candidates continue
            self.out = ends[:, :beam]
            return self._take_over(parents[:, :beam], words[:, :beam], scores[:, :beam])
        # sort the candidates that end after all others
        priority = ends * words.shape[1] + numpy.arange(words.shape[1])
        chosen = numpy.argsort(priority, axis=1)[:, :beam]
        self.out = numpy.take_along_axis(ends, chosen, axis=1)
        parents, words, scores = (numpy.take_along_axis(each, chosen, axis=1) for each in (parents, words, scores))
        return self._take_over(parents, words, scores)

    def _take_over(self, parents, words, scores) -> Continuation:
        parents, words = parents.reshape(-1), words.reshape(-1)
        self.words, self.sums = self.words[parents], self.sums[parents]
        if self.attention is not None:
            self.attention = self.attention[parents]
        self.words[:, self.step] = words
        self.sums[:, self.step] = scores.reshape(-1)
        self.step += 1
        return Continuation(torch.from_numpy(parents), torch.from_numpy(words))

    def _finish(self, ends, scores, parents):
        """Store the hypotheses that end; return whether each sentence continues."""
        going = ~self.at_limit
        for sentence, rank in zip(*ends[:, : self.beam].nonzero()):
            ended = self.ended[self.numbers[sentence]]
            if len(ended) < self.beam:
                score = scores[sentence, rank]
                ended.append(self._hypothesis(parents[sentence, rank], score, self.numbers[sentence]))
            going[sentence] &= len(ended) < self.beam
        return going

    def _hypothesis(self, row: int, score, sentence: int) -> tuple:
        words, sums = self.words[row, : self.step + 1].copy(), self.sums[row, : self.step + 1].copy()
        words[self.step], sums[self.step] = self.eos, score
        sums[1:] = sums[1:] - sums[:-1]
        if self.penalty is not None:
            score = score / numpy.float32((self.step + 1) ** self.penalty)
        if self.lengths is not None and self.step > self.lengths[sentence]:
            score = numpy.float32(-numpy.inf)
        weights = None if self.attention is None else self.attention[row, : self.step + 1].T.copy()
        return words, sums, score, weights

    def results(self) -> list[list[dict[str, Tensor]]]:
        """Return the ended hypotheses of each sentence in the format of fairseq's generators, the best first."""
        found = []
        for ended in self.ended:
            scores = torch.tensor([float(each[2]) for each in ended])
            _, order = torch.sort(scores, descending=True)
            found.append([_as_tensors(*ended[place]) for place in order])
        return found


def rank_by_gnmt(found: list[list[dict[str, Tensor]]], exponent: float) -> list[list[dict[str, Tensor]]]:
    """Sort hypotheses by GNMT's score (Wu et al. 2016, Eq. 14, without coverage), the best first.

    Args:
        found: hypotheses of each sentence, with sums of log-probabilities as scores
        exponent: alpha of the divisor ((5 + length) / 6)^alpha; the length includes end-of-sentence
    """
    for hypotheses in found:
        for each in hypotheses:
            each["score"] = each["score"] / ((5 + len(each["tokens"])) / 6) ** exponent
        hypotheses.sort(key=lambda each: float(each["score"]), reverse=True)
    return found


def _fill_places(going):
    """Return an order of the sentences that continue: the last ones fill the positions of finished sentences.

    Most sentences keep their position, and their caches need no copy.
    """
    count = going.sum()
    order = numpy.arange(count)
    order[~going[:count]] = count + going[count:].nonzero()[0]
    return order


def _as_tensors(words, sums, score, weights) -> dict[str, Tensor]:
    return {
        "tokens": torch.from_numpy(words),
        "score": torch.tensor(score),
        "attention": torch.empty(0) if weights is None else torch.from_numpy(weights),
        "alignment": torch.empty(0),
        "positional_scores": torch.from_numpy(sums),
    }
