"""The data that the integration tests share."""

import random

import pytest

from tests.commands import binarise, write_pairs


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Binarised pairs: 300 for training, 40 for validation, 30 for testing."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(11)
    for split, count in (("train", 300), ("valid", 40), ("test", 30)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid", "test"))
