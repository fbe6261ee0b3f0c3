"""Methods that do all additions between sub-layers themselves: how their layers are split, and what goes with them.

ResiDual, Attention Residuals and Hyper-Connections; the equations, and where they are plain stacks, are proven in
``test_aggregators.py``.
"""

import argparse

import pytest
from torch import nn

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.models import POSTNORM, PRENORM, task_of

DUAL = {"layer_agg": "residual-dual"}
METHODS = {
    "dual": DUAL,
    "full": {"layer_agg": "attention-residual"},
    "block": {"layer_agg": "attention-residual", "attention_residual_block": 3},
    "hyper": {"layer_agg": "hyper-connections"},
}


@pytest.mark.parametrize("flags", METHODS.values(), ids=METHODS)
def test_modules_are_bare_sublayers_whatever_the_norm_placement(flags, build):
    """Their norms are part of the methods."""
    model = build(PRENORM, **flags)
    for stack, count in ((model.encoder, 4), (model.decoder, 6)):
        assert len(stack.layers) == stack.aggregator.num_layers == count
        assert (stack.layer_norm is None) == (flags is DUAL)
        norms = [module for module in stack.layers.modules() if isinstance(module, nn.LayerNorm)]
        assert len(norms) == (0 if flags is DUAL else count)
        assert not any(hasattr(layer, "residual") for layer in stack.layers)
    shapes = [{key: p.shape for key, p in build(name, **flags).named_parameters()} for name in (PRENORM, POSTNORM)]
    assert shapes[0] == shapes[1]


def test_flags_without_effect_are_refused_without_an_architecture_too(dictionary):
    sizes = {f"{side}_{name}": 8 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    flags = {**DUAL, **sizes, "encoder_normalize_before": True, "decoder_normalize_before": True}
    with pytest.raises(UsageError, match="^--encoder-normalize-before has no effect: --layer-agg residual-dual has"):
        DeepTransformerModel.build_model(argparse.Namespace(**flags), task_of(dictionary))
