"""Models for beam search, and tolerances."""

import argparse
import functools

import pytest
import torch

from fairseq_deep.core.native import library

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


def prepare(model, **flags):
    """What ``fairseq-generate`` does with a model that it has loaded."""
    model.prepare_for_inference_(argparse.Namespace(generation=argparse.Namespace(**flags)))
