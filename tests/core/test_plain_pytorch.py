"""The methods without fairseq: errors of a first try, and the example of docs and README."""

import math
import re
import runpy

import pytest
import torch

from fairseq_deep.core import aggregators, inits, memories
from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.stack import MethodConfig, Stack
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples/plain_pytorch.py"


def test_what_is_not_a_stack_is_refused_with_the_way_to_build_one():
    registry = aggregators.AGGREGATORS
    for method in {registry.get(name) for name in registry.names()}:
        built = rf"{method.__name__} takes a Stack, not int; build {method.__name__}\(Stack\(layers=6, dim=512\)\)"
        with pytest.raises(TypeError, match=built):
            method(6, 512)


SIZES = {"layers": 2, "dim": 16, "heads": 2}
LAST, DS, DLCL = (MethodConfig(name, registry.get(name)) for name, registry in (
    ("last", memories.MEMORIES), ("ds", inits.INITS), ("dlcl", aggregators.AGGREGATORS)))  # fmt: skip


def stack(**attributes):
    return Stack(**{**SIZES, **attributes})


def both(**decoder):
    return {"encoder": stack(), "decoder": stack(**{"side": "decoder", **decoder})}


def method(**options):
    return MethodConfig("dlcl", aggregators.Dlcl, options)


def build(stacks):
    return Transformer.build(stacks, 20)


FORM = "stacks must be {side: Stack(..., side=side)"
WRONG = [
    (stack, {"positions": "rope"}, "unknown positions rope; choose from sinusoidal, learned, none, rotary"),
    (stack, {"norm": "pre"}, "unknown --norm pre; choose from layer, rms"),
    (stack, {"activation": "rleu"}, "unknown --activation-fn rleu (did you mean relu?)"),
    (stack, {"side": "enc"}, "unknown side enc (did you mean encoder?)"),
    (stack, {"dropout": 7}, "--dropout must be a number from 0 to 1 (7)"),
    (stack, {"layerdrop": math.nan}, "--encoder-layerdrop must be a number from 0 to 1 (nan)"),
    (stack, {"layers": -1}, "--encoder-layers must be a whole number of at least 0 (-1)"),
    (stack, {"layers": "2"}, "--encoder-layers must be a whole number of at least 0 ('2')"),
    (stack, {"dim": 16.0}, "--encoder-embed-dim must be a whole number of at least 1 (16.0)"),
    (stack, {"pre_norm": "pre"}, "--encoder-normalize-before must be True or False ('pre')"),
    (stack, {"heads": 3}, "--encoder-embed-dim 16 is not divisible by --encoder-attention-heads 3"),
    (stack, {"kv_heads": 4}, "--encoder-kv-heads 4 must be a divisor"),
    (stack, {"offload": True}, "offload requires recompute"),
    (stack, {"memory": LAST}, "memory requires a decoder (last)"),
    (stack, {"aggregator": "dlcl"}, "must be a MethodConfig (dlcl): use MethodConfig(NAME, CLASS), such as"),
    (stack, {"aggregator": DS}, "must be a method of --layer-agg (ds)"),
    (method, {"weigth_type": "vector"}, "unknown option weigth_type of dlcl (did you mean weight_type?)"),
    (method, {"window": "x"}, "--dlcl-window must be a whole number of at least 1 ('x')"),
    (method, {"dropout": math.nan}, "--dlcl-dropout must be a number from 0 to below 1 (nan)"),
    (aggregators.Dlcl, {"stack": stack(), "window": 0}, "--dlcl-window must be a whole number of at least 1 (0)"),
    (SearchOptions, {"beam": 0}, "beam must be a whole number of at least 1 (0)"),
    (SearchOptions, {"beam": "4"}, "beam must be a whole number of at least 1 ('4')"),
    (SearchOptions, {"lenpen": math.nan}, "lenpen must be a number (nan)"),
    (SearchOptions, {"sampling": "no"}, "sampling must be True or False ('no')"),
    (SearchOptions, {"sampling_topp": 2.0}, "sampling_topp must be a number of at most 1 (2.0)"),
    (build, {"stacks": both(side="encoder")}, FORM),
    (build, {"stacks": list(both().values())}, FORM),
    (build, {"stacks": {**both(), "decoder": None}}, FORM),
    (build, {"stacks": both(memory_dim=8)}, "memory_dim of the decoder must be 16, like the other stack (8)"),
    (build, {"stacks": both(other_layers=3)}, "other_layers of the decoder must be 2"),
    (build, {"stacks": both(memory=DLCL)}, "memory must be a method of --decoder-memory"),
    (build, {"stacks": both(language_norm=True)}, "--language-norm requires --num-languages"),
]


@pytest.mark.parametrize("make, arguments, problem", WRONG, ids=[f"{row[0].__name__} {row[2][:40]}" for row in WRONG])
def test_a_wrong_argument_is_refused_when_it_is_given(make, arguments, problem):
    with pytest.raises(UsageError, match=re.escape(problem)):
        make(**arguments)


def test_a_stack_takes_its_layout_and_the_other_depth_from_the_methods_and_the_other_stack():
    lstm = MethodConfig("lstm", aggregators.DepthwiseLstm)
    assert not stack(aggregator=lstm).layout.feed_forward
    model = build({**both(), "encoder": stack(layers=3)})
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
