"""The bookkeeping of beam search: which hypotheses there are, which end, which go on; fairseq's rules, in numpy.

A step has 2 x beam candidates a sentence, the best first. Those among the first *beam* that are an end-of-sentence end
their hypothesis; the best *beam* others go on. A sentence is done when *beam* hypotheses have ended, or at the greatest
length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor


class Continuation(NamedTuple):
    """How a search goes on.

    Attributes:
        order: the hypotheses of the step before that are taken over, by their numbers there (sentences * beam)
        words: the word that each adds
    """

    order: Tensor
    words: Tensor


class Hypotheses:
    """Those of a batch.

    Args:
        sentences, beam: how many
        longest: the greatest number of words, without end-of-sentence
        eos: end-of-sentence
        penalty: exponent of the length that scores are divided by; None: they are not
        lengths: the greatest number of words of each sentence, beyond which its hypotheses score -inf; None: *longest*
        limits: the number of words after which the hypotheses of each sentence end; None: *longest*

    Attributes:
        scores: sentences x beam, sums of log-probabilities; at first, one hypothesis per sentence
        ended: words, log-probabilities and score of the ended hypotheses of each sentence
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
        self.numbers = numpy.arange(sentences)  # of the sentences that go on
        self.words = numpy.zeros((sentences, longest + 1), dtype=numpy.int64)
        self.sums = numpy.zeros((sentences, longest + 1), dtype=numpy.float32)
        self.out = numpy.zeros((sentences, beam), dtype=bool)  # they go on for want of others, and end no more
        self.attention: numpy.ndarray | None = None  # hypotheses x words x source, if there are weights
        self.ended: list[list[tuple]] = [[] for _ in range(sentences)]

    @property
    def scores(self) -> Tensor:
        count = len(self.numbers)
        if self.step == 0:
            return torch.zeros(count, 1)
        return torch.from_numpy(self.sums[:, self.step - 1].reshape(count, -1))

    @property
    def at_limit(self) -> numpy.ndarray:
        """Which of the sentences that go on must end at this step."""
        return self.limits[self.numbers] <= self.step

    def prefixes(self) -> list[list[int]]:
        """The words of each hypothesis so far."""
        return self.words[:, : self.step].tolist()

    def attend(self, weights: Tensor) -> None:
        """Keep the attention weights of this step, hypotheses x source."""
        if self.attention is None:
            self.attention = numpy.zeros((len(weights), self.longest + 1, weights.size(1)), dtype=numpy.float32)
        self.attention[:, self.step] = weights.numpy()

    def advance(self, scores: Tensor, words: Tensor, ranks: Tensor) -> Continuation | None:
        """Take over the candidates of a step (sentences x candidates each); None if the search has ended."""
        scores, words = scores.numpy(), words.numpy()
        sentences, beam = len(self.numbers), self.beam
        before = len(self.words) // sentences  # hypotheses that a sentence has had
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
        if not ends.any():  # so the first go on
            self.out = ends[:, :beam]
            return self._take_over(parents[:, :beam], words[:, :beam], scores[:, :beam])
        # those that end, after all others
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
        """Keep the hypotheses that end; which sentences go on."""
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
        """The ended hypotheses of each sentence as fairseq's generators return them, the best first."""
        found = []
        for ended in self.ended:
            scores = torch.tensor([float(each[2]) for each in ended])
            _, order = torch.sort(scores, descending=True)
            found.append([_as_tensors(*ended[place]) for place in order])
        return found


def rank_by_gnmt(found: list[list[dict[str, Tensor]]], exponent: float) -> list[list[dict[str, Tensor]]]:
    """Hypotheses by GNMT's score (Wu et al. 2016, Eq. 14, without coverage), the best first.

    Args:
        found: of each sentence, with sums of log-probabilities as scores
        exponent: alpha of ((5 + length) / 6)^alpha, by which they are divided; the end symbol counts as a word
    """
    for hypotheses in found:
        for each in hypotheses:
            each["score"] = each["score"] / ((5 + len(each["tokens"])) / 6) ** exponent
        hypotheses.sort(key=lambda each: float(each["score"]), reverse=True)
    return found


def _fill_places(going):
    """The sentences that go on: the first ones stay where they are, and the last ones take the places of the others.

    So what is kept of most sentences need not be copied.
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
