"""Configurations of ``fairseq-hydra-train``: nested keys, keys that are refused, checks of the whole run."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict

import fairseq_deep  # noqa: F401
from fairseq_deep.core.registry import UsageError

ARCH = "transformer_dlcl_6l"


def fill(model, arch=ARCH, **run):
    """The part *model* of a configuration after the architecture has filled it."""
    config = OmegaConf.create({"model": {"_name": arch, **model}, **run})
    OmegaConf.set_struct(config, True)
    with open_dict(config.model):
        ARCH_CONFIG_REGISTRY[arch](config.model)
    return config.model


@pytest.mark.parametrize("nested, flat", [
    ({"encoder": {"embed_dim": 32, "layers": 2}}, {"encoder_embed_dim": 32, "encoder_layers": 2}),
    ({"decoder": {"layers": 1, "layer_agg": "residual"}}, {"decoder_layers": 1, "decoder_layer_agg": "residual"}),
    ({"quant_noise": {"pq": 0.1, "pq_block_size": 4}}, {"quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4}),
    ({"decoder": {"normalize_before": False}, "activation_fn": "gelu"},
     {"decoder_normalize_before": False, "activation_fn": "gelu"}),
    ({"encoder": {"layers_to_keep": [0, 2]}}, {"encoder_layers_to_keep": "0,2"}),
    ({"encoder": {"layers": 2}, "decoder_layers": 3}, {"encoder_layers": 2, "decoder_layers": 3}),
])  # fmt: skip
@pytest.mark.parametrize("arch", [ARCH, "deep_transformer", "dlcl_transformer_toy"])
def test_nested_keys_are_flat_flags(nested, flat, arch):
    filled = fill(nested, arch)
    assert filled == fill(flat, arch) and not {"encoder", "decoder", "quant_noise"} & set(filled)
    assert all(filled[name] == value for name, value in flat.items())


@pytest.mark.parametrize("model, words", [
    ({"encoder": {"layer": 2}}, "model.encoder.layer: unknown setting (did you mean encoder.layers?)"),
    ({"dlcl_windw": 2}, "model.dlcl_windw: unknown setting (did you mean dlcl_window?)"),
    ({"encoders": {"layers": 2}}, "model.encoders: unknown setting"),
    ({"encoder": 2}, "model.encoder: unknown setting (did you mean encoder_"),
    ({"encoder": {"normalize_before": "no"}}, "model.encoder.normalize_before must be true or false ('no')"),
    ({"activation_fn": "rely"}, "model.activation_fn must be one of relu, gelu, "),
    ({"encoder": {"layers": 2}, "encoder_layers": 2}, "model.encoder_layers: it is also given as a"),
    ({"decoder": {"layers": "six"}}, "model.decoder.layers must be an integer ('six')"),
    ({"dropout": True}, "model.dropout must be a number (True)"),
])  # fmt: skip
def test_other_keys_are_refused(model, words):
    with pytest.raises(UsageError) as refused:
        fill(model)
    assert words in str(refused.value) and "\n" not in str(refused.value) and "__" not in str(refused.value)


def test_settings_of_a_checkpoint_are_left_alone():
    """Earlier versions kept nested keys without a use for them, and the machine may be another."""
    old = OmegaConf.to_container(fill({}))
    old.update(encoder={"layers": 2}, a_flag_of_another_version=1)
    filled = fill(old, distributed_training={"ddp_backend": "fully_sharded"})
    assert filled.encoder_layers == 6 and filled.a_flag_of_another_version == 1


@pytest.mark.parametrize("run, words", [
    ({"common": {"bf16": True, "amp": True}}, "--bf16 and --amp exclude each other"),
    ({"criterion": {"_name": "adaptive_loss"}}, "--criterion adaptive_loss requires --adaptive-softmax-cutoff"),
    ({"task": {"_name": "translation", "eval_bleu": True, "eval_bleu_args": '{"max_len_b": 0}'}}, "--eval-bleu-args: "),
    ({"checkpoint": {"restore_file": "x.pt"}}, "--init-from and --restore-file both"),
    ({"checkpoint": {"save_dir": "none"}}, "--init-from none.pt: no such file"),
])  # fmt: skip
def test_flags_of_the_whole_run_are_checked(run, words):
    model = {"init_from": "none.pt"} if "checkpoint" in run else {}
    with pytest.raises(UsageError) as refused:
        fill(model, distributed_training={"ddp_backend": "c10d"}, **run)
    assert words in str(refused.value)


def test_where_a_training_goes_on_neither_init_acts(tmp_path):
    state = {"model": {}, "args": argparse.Namespace(arch=ARCH, deep_init="xavier")}
    torch.save(state, tmp_path / "checkpoint_last.pt")
    run = {"distributed_training": {"ddp_backend": "c10d"}, "checkpoint": {"save_dir": str(tmp_path)}}
    filled = fill({"init_from": "none.pt", "deep_init": "ds", "ds_init_alpha": 0.5}, **run)
    assert filled.init_from is None and filled.deep_init == "xavier" and filled.ds_init_alpha is None
