"""The methods without fairseq: imports, errors of a first try, and the example of docs and README."""

import re
import runpy

import pytest
import torch

from fairseq_deep.core import aggregators, attention, inits, memories, residuals
from fairseq_deep.core.stack import Stack
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples/plain_pytorch.py"
PACKAGES = [
    (aggregators, aggregators.AGGREGATORS),
    (attention, attention.ENCODER_ATTENTIONS),
    (attention, attention.DECODER_ATTENTIONS),
    (inits, inits.INITS),
    (memories, memories.MEMORIES),
    (residuals, residuals.RESIDUALS),
]


@pytest.mark.parametrize("package, registry", PACKAGES, ids=[registry.kind for _, registry in PACKAGES])
def test_packages_export_all_their_methods(package, registry):
    methods = [registry.get(name) for name in registry.names()]
    own = [method for method in methods if method.__module__.startswith(package.__name__)]  # tests register others
    assert own
    for method in own:
        assert getattr(package, method.__name__) is method and method.__name__ in package.__all__


def test_what_is_not_a_stack_is_refused_with_the_way_to_build_one():
    registry = aggregators.AGGREGATORS
    for method in {registry.get(name) for name in registry.names()}:
        built = rf"{method.__name__} takes a Stack, not int; build {method.__name__}\(Stack\(layers=6, dim=512\)\)"
        with pytest.raises(TypeError, match=built):
            method(6, 512)


def test_a_call_names_the_methods_to_use():
    dlcl = aggregators.Dlcl(Stack(layers=2, dim=4))
    with pytest.raises(TypeError, match=r"Dlcl cannot be called; use state = start\(x\), then .* finish\(state\)"):
        dlcl(torch.zeros(1, 1, 4))


def test_the_example_trains(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = dict(re.findall(r"(\w+): loss ([\d.]+)", capsys.readouterr().out))
    assert losses.keys() == {"dlcl_encoder", "lstm_encoder"}
    assert all(float(loss) < 0.9 for loss in losses.values())  # 1 is the variance of the targets
