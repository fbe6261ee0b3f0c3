"""What of a row holds where the user asks for other methods than the row's."""

import argparse

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError
from tests.golden import parse


def parsed(row, *flags):
    return parse(["--arch", f"transformer_{row}", *flags])


@pytest.mark.parametrize(
    "row, flags, left_out, kept",
    [
        ("lstm_concat_6l", ["--layer-agg", "rnn"], ["lstm_merge"], {}),
        ("lstm_1layer_6l", ["--layer-agg", "rnn"], ["lstm_ffn", "lstm_share"], {}),
        ("lstm_1layer_6l", ["--encoder-layer-agg", "dlcl"], ["lstm_share"], {"lstm_ffn": 1}),
        ("lstm_two_6l", ["--decoder-layer-agg", "residual"], ["lstm_merge"], {}),
        ("lstm_two_6l", ["--encoder-layer-agg", "residual"], [], {"lstm_merge": "two"}),
        ("lstm_two_6l", ["--decoder-attn", "merged"], ["lstm_merge"], {}),
        ("lstm_relative_12l_big", ["--layer-agg", "dlcl"], ["relative_positions"], {}),
        ("ode_24l", ["--decoder-layer-agg", "residual"], [], {"relative_positions": 8, "relative_values": True}),
        ("relative_6l", ["--layer-agg", "dlcl"], [], {"relative_positions": 16, "relative_values": True}),
        ("relative_6l", ["--decoder-attn", "average"], ["relative_positions", "relative_values"], {}),
        ("ds_6l", ["--layer-agg", "lstm"], ["deep_init"], {}),
        ("ds_6l", ["--layer-agg", "dlcl"], [], {"deep_init": "ds"}),
        ("lipschitz_6l", ["--layer-agg", "lstm"], [], {"deep_init": "lipschitz"}),
        ("b2t_18l18l", ["--deep-init", "xavier"], ["ds_init_alpha"], {"residual": "b2t"}),
        ("dense_20l", ["--layer-agg", "hierarchical"], ["dlcl_fixed"], {}),
        ("routing_dynamic_6l", ["--layer-agg", "residual"], ["routing_kind"], {}),
    ],
    ids=str,
)
def test_options_of_methods_that_are_replaced_are_left_out(row, flags, left_out, kept):
    args = parsed(row, *flags)
    assert {flag: getattr(args, flag, None) for flag in left_out} == dict.fromkeys(left_out)
    assert {flag: getattr(args, flag, None) for flag in kept} == kept


@pytest.mark.parametrize(
    "row, flags, words",
    [
        ("deepnet_18l18l", {"decoder_attn": "merged"}, "--deep-init deepnet counts three sub-layers"),
        ("deepnet_18l18l", {"decoder_attn": "merged", "layer_agg": "dlcl"}, "--deep-init deepnet counts three"),
        ("ds_matt_6l", {"deep_init": "deepnet"}, "--decoder-attn merged has two"),
        ("sdu_6l", {"layer_agg": "lstm"}, "use --residual plain"),
        ("msc_18l18l", {"layer_agg": "dlcl"}, "use --decoder-memory last"),
        ("dense_20l", {"layer_agg": "msc"}, "add --decoder-memory msc"),
        ("peri_18l18l", {"deep_init": "tfixup"}, "use --residual plain"),
    ],
    ids=str,
)
def test_all_other_clashes_are_told(row, flags, words, dictionary):
    from fairseq_deep.plugin.architectures import build_architecture

    with pytest.raises(UsageError) as error:
        build_architecture(f"transformer_{row}", dictionary, **flags)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("row, flags", [
    ("lstm_1layer_6l", {"decoder_layer_agg": "residual"}), ("lstm_two_6l", {"decoder_attn": "merged"}),
    ("lstm_concat_6l", {"layer_agg": "rnn"}), ("relative_6l", {"layer_agg": "dlcl"}), ("ds_6l", {"layer_agg": "lstm"}),
    ("dense_20l", {"layer_agg": "hierarchical"}), ("ode_24l", {"decoder_layer_agg": "residual"}), ("dlcl_30l", {}),
])  # fmt: skip
def test_hydras_configuration_is_read_as_a_command_line_is(row, flags):
    """fairseq-hydra-train hands over a DictConfig, whose ``vars`` are not the flags."""
    fill = ARCH_CONFIG_REGISTRY[f"transformer_{row}"]
    line, config = argparse.Namespace(**flags), OmegaConf.create(dict(flags))
    fill(line)
    fill(config)
    assert OmegaConf.to_container(config) == vars(line)
