"""What of a row holds where the user asks for other methods than the row's."""

import argparse

import pytest
from omegaconf import OmegaConf

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.description import AXES, describe
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.flags import parse


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


def refusal(args, **more):
    """What is told of *args* with *more*, or None."""
    flags = argparse.Namespace(**{**vars(args), **more})
    try:
        describe(flags)
    except UsageError as error:
        return str(error)


SIDED_CHOICES = [f"{side}layer_agg" for side in ("", "encoder_", "decoder_")]
CHOICES = [
    *({flag: name} for flag in SIDED_CHOICES for name in AGGREGATORS.names()),
    *({"decoder_attn": name} for name in DECODER_ATTENTIONS.names()),
    *({"decoder_attn": "average", "deep_init": name} for name in ("tfixup", "xavier")),
    *({"encoder_layer_agg": "dlcl", "lstm_attn_residual": on} for on in (True, False)),
    {"encoder_layer_agg": "ode", "ode_history": "dlcl", "ode_identity": True},
    {"encoder_layer_agg": "lstm", "encoder_deep_init": "xavier"},
]
SYSTEMS = {(row.norm, row.layer_agg, tuple(option for option in row.options if "dropout" not in option[0])): row
           for row in ARCHITECTURES.values() if row.options or row.layer_agg == "lstm"}  # fmt: skip


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.nightly)], ids=["sample", "all"])
@pytest.mark.parametrize("number", range(len(SYSTEMS)), ids=[row.name for row in SYSTEMS.values()])
def test_presets_are_left_out_where_the_checks_refuse_them(number, every):
    """And only there; fairseq-hydra-train hands over a DictConfig, whose ``vars`` are not the flags."""
    row = list(SYSTEMS.values())[number]
    for flags in CHOICES[number % every :: every]:
        args, config = argparse.Namespace(**flags), OmegaConf.create(dict(flags))
        row.apply(args), row.apply(config)
        assert OmegaConf.to_container(config) == vars(args)
        told = refusal(args)
        for flag, value in (*row.options, ("lstm_attn_residual", True)):
            # a clash of methods is told, unless an aggregator replaces what an initialisation is about
            is_told = flag in AXES and not (flag == "deep_init" and told and "replaces residual connections" in told)
            if flag in flags or is_told:
                continue
            if getattr(args, flag, None) == value:
                assert not told or refusal(args, **{flag: None}), f"{flags} clash with {flag}: {told}"
            elif flag == "lstm_attn_residual" or row._is_asked_for(args, flag):
                assert told or refusal(args, **{flag: value}), f"{flags} do not clash with {flag}"
