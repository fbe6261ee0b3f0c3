"""A vocabulary with tags of languages, so that models which know them need no other; models for decoding."""

import pytest
import torch

from fairseq_deep.core.transformer import Transformer
from tests.helpers.models import VOCAB, make_tagged_dictionary
from tests.helpers.steps import MODELS
from tests.helpers.tensors import shake


@pytest.fixture(scope="session")
def dictionary():
    """Most sources begin with one of its 24 tags."""
    return make_tagged_dictionary(VOCAB, 24)


@pytest.fixture
def prepared(build):
    """prepared(name, **flags): a model of the table of steps, or of an architecture, ready for decoding.

    It is narrow, with random weights, one encoder layer and two decoder layers.
    """

    def prepared(name, **more):
        arch, flags = MODELS.get(name, (name, {}))[:2]
        torch.manual_seed(3)
        model = build(arch, **{"encoder_layers": 1, "decoder_layers": 2, **flags, **more}).eval()
        Transformer.prepare_for_decoding(shake(model, 0.1, around=True))
        return model

    return prepared
