"""Named architectures: parameter counts, flags and methods that replace presets, gradients at full depth.

The presets of every row are in ``tests/snapshots/archs.txt``.
"""

import pytest

from fairseq_deep.plugin.architectures import ARCHITECTURES, count_parameters, list_archs, stored_count
from tests.helpers.flags import parse
from tests.helpers.invariances import every_parameter_gets_a_finite_gradient
from tests.helpers.methods import structure

DEEPEST_LAST = sorted(ARCHITECTURES.values(), key=lambda row: row.encoder_layers + row.decoder_layers)
STRUCTURES = [*{structure(row): row.name for row in DEEPEST_LAST}.values()]
of_each_structure = pytest.mark.parametrize("name", STRUCTURES)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in STRUCTURES else [pytest.mark.nightly]) for name in list_archs()
])  # fmt: skip
def test_parameter_count_is_that_of_the_table(name):
    """Written once by python -m tests.helpers.renew; those of papers and formulas are in tests/core/test_counts.py."""
    assert count_parameters(name) == stored_count(name)


@of_each_structure
def test_every_parameter_of_the_deepest_model_of_a_structure_gets_a_finite_gradient(name, build, dictionary):
    every_parameter_gets_a_finite_gradient(lambda: build(name), dictionary)


@of_each_structure
def test_a_flag_overrides_a_preset(name):
    chosen = {
        "encoder_layers": 3, "decoder_layers": 5, "encoder_embed_dim": 48, "decoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 72, "decoder_ffn_embed_dim": 56,  # the other aggregator has feed-forward sub-layers
        "encoder_attention_heads": 6, "decoder_attention_heads": 2,
        "dropout": 0.25, "attention_dropout": 0.35, "activation_dropout": 0.45,
        "layer_agg": "residual" if ARCHITECTURES[name].layer_agg != "residual" else "dlcl",
    }  # fmt: skip
    sides = {"encoder_normalize_before", "decoder_normalize_before"}  # fairseq has no flag that says no
    assert {*ARCHITECTURES[name].presets()} - sides == {*chosen}
    words = [word for flag, value in chosen.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    args = parse("--arch", name, "--encoder-normalize-before", "--decoder-normalize-before", *words)
    assert {flag: getattr(args, flag) for flag in {*chosen, *sides}} == {**chosen, **dict.fromkeys(sides, True)}


def test_flags_that_speak_for_another():
    """As in fairseq: a width of the encoder holds for the decoder, --relu-dropout is the old --activation-dropout."""
    args = parse("--arch", "transformer_dlcl_30l", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96",
                 "--relu-dropout", "0.3")  # fmt: skip
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.activation_dropout) == (64, 96, 0.3)


@pytest.mark.parametrize("row, flags, left_out, kept", [
    ("lstm_concat_6l", "--layer-agg rnn", ["lstm_merge"], {}),
    ("lstm_1layer_6l", "--encoder-layer-agg dlcl", ["lstm_share"], {"lstm_ffn": 1}),
    ("lstm_1layer_6l", "--decoder-attn average --decoder-embed-dim 256", ["lstm_share"], {}),
    ("lstm_two_6l", "", ["lstm_attn_residual"], {"lstm_merge": "two"}),
    ("lstm_relative_12l_big", "--layer-agg dlcl", ["relative_positions"], {}),
    ("relative_6l", "--layer-agg dlcl", [], {"relative_positions": 16, "relative_values": True}),
    ("b2t_18l18l", "--deep-init xavier", ["ds_init_alpha"], {"residual": "b2t"}),
    ("ode_24l", "--decoder-attn average", ["relative_positions", "relative_values"], {"ode_history": "dlcl"}),
    ("transparent_16l", "--decoder-attn average --deep-init tfixup", [], {"layernorm_embedding": False}),
    ("deepnet_18l18l", "--encoder-layer-agg lstm --encoder-deep-init xavier", [], {"deep_init": "deepnet"}),
    ("modern_6l", "--residual peri", ["encoder_residual"], {"norm": "rms", "ffn": "swiglu"}),
    ("modern_6l", "--relative-positions 4", ["rotary_positions"], {"relative_positions": 4}),
    ("modern_6l", "--encoder-learned-pos", ["rotary_positions"], {"norm": "rms"}),
    ("modern_6l", "--no-token-positional-embeddings", ["rotary_positions"], {"norm": "rms"}),
    ("modern_6l", "--deep-init tfixup --residual plain", ["norm"], {"ffn": "swiglu"}),
    ("modern_6l", "--activation-fn gelu", ["ffn"], {"norm": "rms"}),
])  # fmt: skip
def test_options_of_methods_that_are_replaced_are_left_out(row, flags, left_out, kept):
    args = parse("--arch", f"transformer_{row}", *flags.split())
    assert {flag: getattr(args, flag, None) for flag in left_out} == dict.fromkeys(left_out)
    assert {flag: getattr(args, flag, None) for flag in kept} == kept


def test_a_preset_that_conflicts_is_named(caplog):
    caplog.set_level("INFO", "fairseq_deep")
    parse("--arch", "transformer_modern_6l", "--layer-agg", "dlcl")
    assert "transformer_modern_6l: its --encoder-residual completep is not used, because it conflicts" in caplog.text
