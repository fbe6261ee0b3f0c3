"""Beam search that sorts fewer candidates, against fairseq's."""

import argparse

import pytest
import torch
from fairseq import search
from fairseq.data import Dictionary

from fairseq_deep.search import BLOCK, BeamSearch
from fairseq_deep.task import DeepTranslationConfig, DeepTranslationTask


def a_dictionary(size):
    words = Dictionary()
    for index in range(size - len(words)):
        words.add_symbol(f"word{index}")
    return words


def assert_same_candidates(beam, words, step, lprobs, scores):
    dictionary = a_dictionary(words)
    expected = search.BeamSearch(dictionary).step(step, lprobs.clone(), scores)
    before = lprobs.clone()
    actual = BeamSearch(dictionary).step(step, lprobs, scores)
    assert torch.equal(lprobs, before)
    for got, want in zip(actual, expected):
        assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize("beam", [1, 4, 7])
@pytest.mark.parametrize("words", [40, 17 * BLOCK, 2000, 33 * BLOCK - 1, 33 * BLOCK + 1])
@pytest.mark.parametrize("step", [0, 3])
def test_candidates_are_fairseqs(beam, words, step):
    """Also where a sentence's best are all in one block, or in the last words, which are no whole block."""
    lprobs = torch.randn(6, beam, words)
    lprobs[1, :, BLOCK - 3 : BLOCK + 3] += 9.0
    lprobs[2, :, -BLOCK // 2 :] += 9.0
    lprobs[3, 0, : min(BLOCK, words)] += 9.0
    lprobs[4, -1, ::BLOCK] += 9.0
    assert_same_candidates(beam, words, step, lprobs.log_softmax(2), torch.randn(6, beam, step).cumsum(2))


def test_candidates_that_have_no_probability():
    """A hypothesis that is out, and words that are forbidden; more than enough are left."""
    lprobs, scores = torch.randn(3, 4, 1500).log_softmax(2), torch.randn(3, 4, 2)
    scores[0, 1:] = -float("inf")
    lprobs[1, :, 20:] = -float("inf")
    lprobs[2, 2] = -float("inf")
    assert_same_candidates(4, 1500, 2, lprobs, scores)


def test_long_rows_are_not_sorted(monkeypatch):
    sorted_at_once, topk = [], torch.topk

    def watch(values, *args, **options):
        sorted_at_once.append(values.size(-1))
        return topk(values, *args, **options)

    monkeypatch.setattr(torch, "topk", watch)
    BeamSearch(a_dictionary(8000)).step(0, torch.randn(2, 4, 8000), None)
    BeamSearch(a_dictionary(8000)).step(1, torch.randn(2, 4, 8000), torch.zeros(2, 4, 1))
    assert sorted_at_once == [8 * BLOCK, 4 * 8 * BLOCK]


def test_other_devices_and_scripts_keep_fairseqs():
    dictionary = a_dictionary(2000)
    ours, lprobs = BeamSearch(dictionary), torch.randn(3, 4, 2000)
    assert [part.device.type for part in ours.step(0, lprobs.to("meta"), None)] == ["meta"] * 3
    scripted = torch.jit.script(ours)
    for got, want in zip(scripted.step(0, lprobs, None, None, None), ours.step(0, lprobs, None)):
        assert torch.equal(got, want)


def test_the_task_replaces_plain_beam_search_alone(build, dictionary):
    task = DeepTranslationTask(DeepTranslationConfig(), dictionary, dictionary)
    model = build("transformer_postnorm_2l2l_tiny").eval()
    kinds = {}
    for name, flags in {"plain": {}, "sampling": {"sampling": True}, "diverse": {"diverse_beam_groups": 2}}.items():
        kinds[name] = type(task.build_generator([model], argparse.Namespace(beam=4, **flags)).search)
    assert kinds == {"plain": BeamSearch, "sampling": search.Sampling, "diverse": search.DiverseBeamSearch}
    scorer = task.build_generator([model], argparse.Namespace(score_reference=True))
    assert not hasattr(scorer, "search")
