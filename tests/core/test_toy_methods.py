"""Methods that the package does not know (``tests/helpers/toy_methods.py``), used without an edit to it.

The whole suite of invariances runs over them, and a training run through the command line.
"""


import pytest

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.diagnostics import depth_record
from fairseq_deep.core.registry import UsageError
from tests.helpers.invariances import INVARIANCES
from tests.helpers.toy_methods import TOYS, register

MODELS = {
    "aggregator": {"layer_agg": "toy", "toy_dropout": 0.0},
    "all": {"layer_agg": "toy", "decoder_memory": "toy", "toy_start": 0.3, "residual": "toy", "decoder_attn": "merged"},
    "one side": {"encoder_layer_agg": "toy", "decoder_layer_agg": "dlcl"},
}


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for registry in {id(registry): registry for registry, _, _ in TOYS}.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    register()


@pytest.mark.parametrize("invariance", INVARIANCES)
@pytest.mark.parametrize("name, norm", [("aggregator", "prenorm"), ("all", "postnorm"), ("one side", "prenorm")])
def test_invariance(name, norm, invariance, build, dictionary):
    def make(**flags):
        model = build(f"transformer_{norm}_2l2l_tiny", **{**MODELS[name], **flags})
        chosen = MODELS[name].get("layer_agg", "residual")
        assert type(model.encoder.aggregator) is AGGREGATORS.get(MODELS[name].get("encoder_layer_agg", chosen))
        return model

    INVARIANCES[invariance](make, dictionary)


def test_what_a_method_shows_is_recorded(build, batch):
    model = build("transformer_prenorm_2l2l_tiny", layer_agg="toy").train()
    model(*batch)[0].sum().backward()
    record = depth_record(model)
    assert record["toy_enc_share"] == record["toy_dec_share"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"layer_agg": "toy", "toy_dropout": 1.0}, "--toy-dropout must be a number from 0 to below 1 (1.0)"),
        ({"toy_dropout": 0.1}, "--toy-dropout has no effect without --layer-agg toy: add that, or omit it"),
        ({"layer_agg": "toy", "encoder_layerdrop": 0.1}, "which requires every layer (encoder): omit or change one"),
    ],
)
def test_clashes_are_refused_in_one_line(flags, words, build):
    with pytest.raises(UsageError) as error:
        build("transformer_prenorm_2l2l_tiny", **flags)
    assert words in str(error.value) and "\n" not in str(error.value)


