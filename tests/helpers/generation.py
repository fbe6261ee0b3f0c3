"""Beam search over small models that is lively: hypotheses change places, and end at different steps."""

import argparse

import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator

from tests.helpers.invariances import NEAR
from tests.helpers.models import make_batch

LENGTHS = (7, 3, 5, 2, 6)


def strengthen(model):
    """Give matrices weights that make words and sources matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)


class Restless(search.BeamSearch):
    """Beam search that adds something of each sentence, step and word to the scores.

    Models with random weights repeat themselves; this makes hypotheses differ, change places, and end at all steps.
    """

    def __init__(self, words):
        super().__init__(words)
        self.noise = 4 * torch.randn(50, 60, len(words), generator=torch.Generator().manual_seed(5))
        self.noise[:, :, words.eos()] += 4.0

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        lprobs = lprobs + self.noise[original_batch_idxs, step].unsqueeze(1).to(lprobs)
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)


def make_sample(dictionary, lengths=LENGTHS):
    source, lengths, _ = make_batch(dictionary, lengths=lengths)
    source[:, -1] = dictionary.eos()
    return {"id": torch.arange(len(lengths)), "net_input": {"src_tokens": source, "src_lengths": lengths}}


def generate(models, dictionary, sample, kind=SequenceGenerator, strategy=Restless, incremental=True, **options):
    torch.manual_seed(3)  # for sampling
    models = models if isinstance(models, list) else [models]
    given = {name: options.pop(name) for name in ("prefix_tokens",) if name in options}
    options = {"beam_size": 4, "max_len_b": 18, **options}
    generator = kind(models, dictionary, search_strategy=strategy(dictionary), **options)
    generator.model.has_incremental = incremental
    return generator.generate(models, sample, **given)


def prepare(model, **flags):
    """What ``fairseq-generate`` does with a model that it has loaded."""
    model.prepare_for_inference_(argparse.Namespace(generation=argparse.Namespace(**flags)))


def assert_same(actual, expected, attention=True):
    """The same hypotheses of each sentence in the same order, with scores and, unless told otherwise, attention."""
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected):
        assert [hypothesis["tokens"].tolist() for hypothesis in ours] == [h["tokens"].tolist() for h in theirs]
        for got, want in zip(ours, theirs):
            for name in ("score", "positional_scores", *(["attention"] if attention else [])):
                assert got[name].numel() > 0 or name != "attention"
                torch.testing.assert_close(got[name], want[name], **NEAR)


def assert_lively(hypotheses, beam=4):
    """Sentences end at different steps, so that they leave the batch one after the other, and differ in their words."""
    lengths = [sorted(len(hypothesis["tokens"]) for hypothesis in sentence) for sentence in hypotheses]
    assert all(len(sentence) == beam for sentence in lengths)
    assert len({sentence[-1] for sentence in lengths}) > 2 and max(lengths)[-1] > 5
    words = {tuple(hypothesis["tokens"].tolist()) for sentence in hypotheses for hypothesis in sentence}
    assert len(words) > 0.9 * beam * len(hypotheses)
