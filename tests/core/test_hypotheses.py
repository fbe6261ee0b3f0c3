"""The bookkeeping of beam search against fairseq's rules, sentence by sentence, on random candidates."""

import numpy
import pytest
import torch

from fairseq_deep.core.search.hypotheses import Hypotheses

EOS, WORDS, NOTHING = 2, 9, -float("inf")


class Naive:
    """One sentence, as `fairseq.sequence_generator` treats it.

    Candidates among the first *beam* that are an end-of-sentence end their hypothesis, but for those whose score is
    -inf or whose hypothesis went on only for want of others. The best *beam* others go on.
    """

    def __init__(self, beam, longest, penalty):
        self.beam, self.longest, self.penalty = beam, longest, penalty
        self.going, self.ended, self.step = [([], [], False)], [], 0

    def advance(self, scores, words, ranks):
        """Return the ranks of the hypotheses that continue; None if the sentence has ended."""
        candidates = []
        for place, (score, word, rank) in enumerate(zip(scores, words, ranks)):
            ends = word == EOS and score != NOTHING
            ignored = place < self.beam and place < len(self.going) and self.going[place][2]
            if place < self.beam and ends and not ignored and len(self.ended) < self.beam:
                self.ended.append(self.finished(*self.going[rank][:2], score))
            candidates.append((ends or ignored, place, score, word, rank))
        if len(self.ended) == self.beam or self.step == self.longest:
            return None
        best = sorted(candidates)[: self.beam]
        before, self.step = self.going, self.step + 1
        self.going = [([*before[rank][0], word], [*before[rank][1], score], out) for out, _, score, word, rank in best]
        return [rank for *_, rank in best]

    def finished(self, words, sums, score):
        sums = numpy.array([*sums, score], dtype=numpy.float32)
        steps = numpy.concatenate([sums[:1], sums[1:] - sums[:-1]])
        final = score if self.penalty is None else score / numpy.float32((self.step + 1) ** self.penalty)
        return [*words, EOS], steps, final


def candidates(generator, beam, going):
    """Of one sentence: scores from the best on, some of them -inf. Words end often, and most so among the last ones.

    A real search has at most *beam* ends among its candidates, one for each hypothesis.
    """
    count = 2 * beam
    scores = torch.randn(count, generator=generator).sort(descending=True)[0]
    if torch.rand((), generator=generator) < 0.4:
        scores[count - int(torch.randint(count, (1,), generator=generator)) :] = NOTHING
    words = torch.randint(WORDS, (count,), generator=generator)
    words[torch.rand(count, generator=generator) < torch.tensor([0.35, 0.8]).repeat_interleave(beam)] = EOS
    return scores, words, torch.randint(going, (count,), generator=generator)


@pytest.mark.parametrize("penalty", [None, 0.0, 0.6])
@pytest.mark.parametrize("beam, longest", [(1, 4), (3, 6), (4, 2)])
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 40))])
def test_hypotheses_are_those_of_each_sentence_alone(seed, beam, longest, penalty):
    """With one limit for all sentences and, in every second draw, with a limit for each."""
    generator = torch.Generator().manual_seed(seed)
    limits = [longest, 1, longest, longest // 2, 0] if seed % 2 else None
    ours = Hypotheses(5, beam, longest, EOS, penalty, limits=limits)
    alone = [Naive(beam, limit, penalty) for limit in limits or [longest] * 5]
    running = list(range(5))
    for step in range(longest + 1):
        drawn = {number: candidates(generator, beam, beam if step else 1) for number in running}
        given = [torch.stack([drawn[number][part] for number in running]) for part in range(3)]
        order = {number: alone[number].advance(*(part.tolist() for part in drawn[number])) for number in running}
        found = ours.advance(*given)
        if found is None:
            assert all(ranks is None for ranks in order.values()) or step == longest
            break
        rows = {number: place * (beam if step else 1) for place, number in enumerate(running)}
        running = ours.numbers.tolist()
        assert sorted(running) == [number for number in sorted(order) if order[number] is not None]
        assert found.order.tolist() == [rows[number] + rank for number in running for rank in order[number]]
        assert found.words.tolist() == [words[-1] for number in running for words, _, _ in alone[number].going]
        wanted = [[sums[-1] for _, sums, _ in alone[number].going] for number in running]
        torch.testing.assert_close(ours.scores, torch.tensor(wanted))
    for one, got in zip(alone, ours.results()):
        wanted = sorted(one.ended, key=lambda each: -each[2])
        assert [each["tokens"].tolist() for each in got] == [words for words, _, _ in wanted]
        for each, (_, steps, score) in zip(got, wanted):
            torch.testing.assert_close(each["positional_scores"], torch.from_numpy(steps), equal_nan=True)
            torch.testing.assert_close(float(each["score"]), float(score), rtol=1e-6, atol=1e-6)


