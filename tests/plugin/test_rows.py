"""What of a row holds where the user asks for other methods than the row's."""

import argparse

import pytest
from omegaconf import OmegaConf

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.description import AXES, describe
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES


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
    {"decoder_attn": "average", "decoder_embed_dim": 256}, {"deep_init": "tfixup", "residual": "plain"},
    {"residual": "peri"}, {"relative_positions": 4}, {"encoder_learned_pos": True}, {"activation_fn": "gelu"},
    {"no_token_positional_embeddings": True},
]  # fmt: skip
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
