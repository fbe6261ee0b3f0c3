"""A vocabulary with tags of languages, so that models which know them need no other."""

import pytest

from tests.helpers.models import VOCAB, make_tagged_dictionary


@pytest.fixture(scope="session")
def dictionary():
    """Most sources begin with one of its 24 tags."""
    return make_tagged_dictionary(VOCAB, 24)
