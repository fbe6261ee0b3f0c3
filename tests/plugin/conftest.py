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


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A few pairs, of which trainings take less than a second: 60 for training, 8 for validation."""
    folder, rng = tmp_path_factory.mktemp("small"), random.Random(1)
    for split, count in (("train", 60), ("valid", 8)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid"))
