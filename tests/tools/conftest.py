"""A small model as a recipe leaves it, for the tests of what is done with trained ones."""

import pytest

from fairseq_deep.tools import main
from tests.helpers.trained import train_recipe


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a recipe, as its stages leave it, with two checkpoints of a small model."""
    exp = tmp_path_factory.mktemp("recipe")
    train_recipe(exp, "--joined-dictionary")
    return exp


@pytest.fixture
def command(capsys):
    """command(NAME, ...): exit code, output and errors."""

    def command(*words):
        capsys.readouterr()
        return main.main([*map(str, words)]), *capsys.readouterr()

    return command
