"""Models to export."""

import pytest

from tests.helpers.exports import write_model
from tests.helpers.models import PRENORM, make_dictionary
from tests.helpers.trained import train_recipe


@pytest.fixture
def make(tmp_path):
    """make(name, **flags): a model with random norms and biases, and the folder with its parts.

    The source has 30 entries and the target 38; "swap": the other way round; "one": both have the target's.
    """

    def make(name, swap=False, one=False, **flags):
        source, target = make_dictionary(30), make_dictionary(38)
        both = (target, source) if swap else (source, target)
        both = (target, target) if one or "share_all_embeddings" in flags else both
        return write_model(tmp_path, name, both, **flags), tmp_path

    return make


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A recipe's folder as `trained`, of a model that all formats support."""
    exp = tmp_path_factory.mktemp("plain")
    train_recipe(exp, "--joined-dictionary", arch=PRENORM)
    return exp
