"""Methods that the package does not know (``tests/helpers/toy_methods.py``), used without an edit to it.

The whole suite of invariances runs over them; ``tests/plugin/test_plugins.py`` has all commands with one.
"""

import pytest

from fairseq_deep.core.aggregators import AGGREGATORS
from tests.helpers.invariances import INVARIANCES
from tests.helpers.toy_methods import TOYS

MODELS = {
    "aggregator": {"layer_agg": "toy"},
    "all": {"layer_agg": "toy", "decoder_memory": "toy", "toy_start": 0.3, "residual": "toy", "decoder_attn": "merged"},
    "one side": {"encoder_layer_agg": "toy", "decoder_layer_agg": "dlcl"},
}


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Known as "toy", as by a module in the package's folders."""
    for registry, method in TOYS:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        registry.register("toy")(method)


@pytest.mark.parametrize("invariance", INVARIANCES)
@pytest.mark.parametrize("name, norm", [("aggregator", "prenorm"), ("all", "postnorm"), ("one side", "prenorm")])
def test_invariance(name, norm, invariance, build, dictionary):
    def make(**flags):
        model = build(f"transformer_{norm}_2l2l_tiny", **{**MODELS[name], **flags})
        chosen = MODELS[name].get("layer_agg", "residual")
        assert type(model.encoder.aggregator) is AGGREGATORS.get(MODELS[name].get("encoder_layer_agg", chosen))
        return model

    INVARIANCES[invariance](make, dictionary)
