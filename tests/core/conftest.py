"""A vocabulary with tags of languages, so that models which know them need no other; models of the table of steps."""

import pytest

from tests.helpers.generation import prepared_model
from tests.helpers.models import VOCAB, make_tagged_dictionary
from tests.helpers.steps import MODELS


@pytest.fixture(scope="session")
def dictionary():
    """Most sources begin with one of its 24 tags."""
    return make_tagged_dictionary(VOCAB, 24)


@pytest.fixture
def prepared(dictionary):
    """prepared(name, **flags): a model of the table, ready for decoding."""

    def make(name, **more):
        arch, flags = MODELS[name][:2]
        return prepared_model(arch, dictionary, **{**flags, **more})

    return make
