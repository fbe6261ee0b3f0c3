"""The methods without fairseq: errors of a first try, and the example of docs and README.

Wrong arguments are in ``tests/errors/python.txt``.
"""

import re
import runpy

import pytest
import torch

from fairseq_deep.core import aggregators
from fairseq_deep.core.stack import MethodConfig, Stack
from fairseq_deep.core.transformer import Transformer
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples/plain_pytorch.py"


def test_what_is_not_a_stack_is_refused_with_the_way_to_build_one():
    registry = aggregators.AGGREGATORS
    for method in {registry.get(name) for name in registry.names()}:
        built = rf"{method.__name__} takes a Stack, not int; build {method.__name__}\(Stack\(layers=6, dim=512\)\)"
        with pytest.raises(TypeError, match=built):
            method(6, 512)


def test_a_stack_takes_its_layout_and_the_other_depth_from_the_methods_and_the_other_stack():
    lstm = MethodConfig("lstm", aggregators.DepthwiseLstm)
    assert not Stack(2, 16, aggregator=lstm).layout.feed_forward
    stacks = {side: Stack(layers, 16, heads=2, side=side) for side, layers in (("encoder", 3), ("decoder", 2))}
    model = Transformer.build(stacks, 20)
    assert (model.encoder.stack.decoder_layers, model.decoder.stack.encoder_layers) == (2, 3)


def test_a_call_names_the_methods_to_use():
    dlcl = aggregators.Dlcl(Stack(layers=2, dim=4))
    with pytest.raises(TypeError, match=r"Dlcl cannot be called; use state = start\(x\), then .* finish\(state\)"):
        dlcl(torch.zeros(1, 1, 4))


def test_the_example_trains(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = dict(re.findall(r"(\w+): loss ([\d.]+)", capsys.readouterr().out))
    assert losses.keys() == {"dlcl_encoder", "lstm_encoder"}
    assert all(float(loss) < 0.9 for loss in losses.values())  # 1 is the variance of the targets
