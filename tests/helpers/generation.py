"""Models, batches and hypotheses of beam search."""

import argparse
import functools

import pytest
import torch

from fairseq_deep.core.native import library
from tests.helpers.invariances import NEAR
from tests.helpers.models import make_batch

near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-5)


def without_kernels(run):
    """What *run* returns where C++ kernels are off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "enabled", False)
        return run()


def strengthen(model):
    """Give matrices weights that make words and sources matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)


def make_sample(dictionary, lengths):
    source, lengths, _ = make_batch(dictionary, lengths=lengths)
    source[:, -1] = dictionary.eos()
    return {"id": torch.arange(len(lengths)), "net_input": {"src_tokens": source, "src_lengths": lengths}}


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
