"""Import paths and names of the last release."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

from fairseq_deep.core.aggregators import Ode
from fairseq_deep.core.stack import Layout, Stack
from fairseq_deep.errors import UsageError
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


def test_methods_of_the_last_release_work_and_warn():
    with pytest.warns(FutureWarning) as warned:

        class Thrice(Ode):
            idle_flags = {"activation_fn": ("relu", "has its own")}

            def __init__(self, stack):
                super().__init__(stack, method="ema")
                self.calls = 3

            @classmethod
            def around(cls, options):
                return super().around({"history": "dlcl"})

            @classmethod
            def layout(cls, side, options):
                return Layout(calls=3)

            def point(self, x, outputs):
                return super().point(x, outputs) + 1

    assert {str(warning.message) for warning in warned} == {
        f"Thrice.{names}" for names in ("point is now called next_input", "around is now called inner_method",
                                        "idle_flags is now called unused_flags")
    }  # fmt: skip
    assert {warning.filename for warning in warned} == {__file__}
    x = torch.zeros(1, 1, 8)
    with pytest.warns(FutureWarning, match="Thrice.calls is now called num_evaluations") as warned:
        aggregator = Thrice(Stack(2, 8))
        assert warned[0].filename == __file__
    assert aggregator.num_evaluations == aggregator.calls == 3 and torch.equal(aggregator.next_input(x, []), x + 1)
    assert Thrice.unused_flags == {"activation_fn": ("relu", "has its own")} and Thrice.inner_method({}) == "dlcl"
    with pytest.warns(FutureWarning, match="is now called num_evaluations") as warned:
        assert Thrice.layout("encoder", {}) == Layout(num_evaluations=3)
        assert warned[0].filename == __file__


def test_the_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)

        class Twice(Ode):
            unused_flags = {}

            def next_input(self, x, outputs):
                return super().next_input(x, outputs)

        assert Twice(Stack(2, 8)).num_evaluations == Layout(num_evaluations=2).num_evaluations == 2
    assert Twice.point is Twice.next_input and Twice.idle_flags == {} and Twice.around({}) == "residual"


def test_a_cache_with_the_old_name_is_rejected(build):
    """It would silently not be reordered."""
    model = build("transformer_dlcl_2l2l_tiny")

    class Old(torch.nn.Module):
        def follow(self, state, order):
            pass

    model.decoder.extra = Old()
    with pytest.raises(UsageError, match="Old.follow is now called reorder; rename it"):
        model.prepare_for_decoding()
