"""A packaged model with two dictionaries, merges and Moses tokenisation."""

import pytest

from fairseq_deep.cli import main
from tests.helpers.trained import train_recipe


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """The folder of a recipe."""
    exp = tmp_path_factory.mktemp("recipe")
    train_recipe(exp, shares=False)
    return exp


@pytest.fixture(scope="session")
def package(recipe, tmp_path_factory):
    """Its packaged model."""
    folder = tmp_path_factory.mktemp("package") / "model"
    assert main(["package", str(recipe), "--output", str(folder)]) == 0
    return folder
