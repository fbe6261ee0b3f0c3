"""The queue: what makes a batch, what happens if it fails, and that every request gets its own answer."""

import pytest

from fairseq_deep.runtime import Translator
from fairseq_deep.serving.batching import Batcher
from tests.helpers.processes import until
from tests.serving import DE, EN, Fake


@pytest.fixture
def make():
    """make(**options): a started batcher with two fakes, closed after the test."""
    made = []

    def make(**options):
        batcher = Batcher({EN: Fake(), DE: Fake()}, **{"window": 0.0, **options})
        batcher.start()
        made.append(batcher)
        return batcher

    yield make
    for batcher in made:
        for fake in batcher.translators.values():
            fake.ready.set()
        batcher.close()


def texts(answer):
    return [[each.text for each in hypotheses] for hypotheses in answer.result(30)]


def test_requests_of_one_window_are_one_batch(make):
    batcher = make(window=0.3)
    answers = [batcher.submit(EN, [word, word[::-1]]) for word in ("abc", "de")]
    assert [texts(answer) for answer in answers] == [[["ABC"], ["CBA"]], [["DE"], ["ED"]]]
    assert batcher.translators[EN].batches == [["abc", "cba", "de", "ed"]]


def test_a_full_batch_does_not_wait_for_the_window(make):
    batcher = make(window=60.0, batch_size=4)
    assert texts([batcher.submit(EN, ["a"]) for _ in range(4)][-1]) == [["A"]]


def test_a_batch_has_the_oldest_request_and_those_of_similar_length(make):
    batcher = make(batch_size=3)
    fake = batcher.translators[EN]
    fake.ready.clear()
    answers = [batcher.submit(EN, ["first"])]
    until(lambda: not batcher.waiting)  # the thread has it
    lengths = (5, 90, 6, 70, 4, 80, 100)
    answers += [batcher.submit(EN, ["x" * length]) for length in lengths]
    fake.ready.set()
    assert [texts(answer)[0][0] for answer in answers[1:]] == ["X" * length for length in lengths]
    assert [sorted(map(len, batch)) for batch in fake.batches[1:]] == [[4, 5, 6], [80, 90, 100], [70]]


def test_pairs_are_not_mixed_and_each_request_gets_its_number_of_hypotheses(make):
    batcher = make(window=0.2)
    answers = [batcher.submit(pair, ["a"], nbest) for pair, nbest in ((EN, 1), (DE, 2), (EN, 3))]
    assert [texts(answer) for answer in answers] == [[["A"]], [["A", "A1"]], [["A", "A1", "A2"]]]
    assert batcher.translators[EN].batches == [["a", "a"]] and batcher.translators[DE].batches == [["a"]]


def test_a_failing_line_fails_its_own_request_only(make):
    batcher = make(window=0.2)
    good, bad, other = (batcher.submit(EN, [line]) for line in ("a", "fail", "b"))
    assert texts(good) == [["A"]] and texts(other) == [["B"]]
    with pytest.raises(RuntimeError, match="failed as asked"):
        bad.result(30)
    assert batcher.alive and texts(batcher.submit(EN, ["c"])) == [["C"]]


def test_a_translation_does_not_depend_on_the_batch(models, lines):
    """With the limit of each sentence; with that of the batch it does, where a hypothesis reaches the limit."""
    translator, lines = models[0].translator, lines[:60]
    together, each = translator.translate(lines), [translator.translate(line) for line in lines]
    assert together == each
    fairseqs = Translator(models[0].bundle, cpu=True, max_len_a=0.5, max_len_b=3)
    assert sum(one != other for one, other in zip(fairseqs.translate(lines), each)) > 10
