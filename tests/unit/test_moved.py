"""Old import paths of documented names."""

import importlib
import subprocess
import sys

import pytest

from fairseq_deep.moved import MOVED


@pytest.mark.parametrize("old, new", MOVED.items())
def test_an_old_path_is_the_module_and_warns(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, f"fairseq_deep.{old}", raising=False)
    with pytest.warns(FutureWarning, match=f"import fairseq_deep.{new}"):
        module = importlib.import_module(f"fairseq_deep.{old}")
    assert module is importlib.import_module(f"fairseq_deep.{new}")
    assert module.__spec__.name == module.__name__ == f"fairseq_deep.{new}"


def test_names_of_older_programs():
    """The example of the last release, and the card of a model that it packaged."""
    program = "from fairseq_deep.aggregators import Dlcl\nfrom fairseq_deep.aggregators.base import Aggregator\n" \
        "from fairseq_deep.stack import Stack\n" \
        "from fairseq_deep.models.deep_transformer import DeepTransformerModel\n" \
        "assert isinstance(Dlcl(Stack(2, 8)), Aggregator) and DeepTransformerModel.from_pretrained"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has moved: import fairseq_deep.core.aggregators\n") == 1


def test_an_unknown_module_is_unknown():
    with pytest.raises(ModuleNotFoundError, match="fairseq_deep.nothing"):
        importlib.import_module("fairseq_deep.nothing")
