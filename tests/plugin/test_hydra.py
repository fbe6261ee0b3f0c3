"""Configurations of ``fairseq-hydra-train``: nested keys, keys that are refused, checks of the whole run."""

import argparse
import shlex

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq_cli import hydra_train  # noqa: F401
from hydra._internal.utils import get_args
from omegaconf import OmegaConf, open_dict

import fairseq_deep  # noqa: F401
from fairseq_deep.core.registry import UsageError
from tests.errors import assert_says, rows
from tests.helpers.commands import PACKAGE, hypotheses, run, saved

ARCH = "transformer_dlcl_6l"


def test_fairseq_hydra_train_has_a_parser_and_help_without_a_warning():
    """Without the edit of our fairseq, hydra's parser fails."""
    assert get_args(["--config-name", "mine"]).config_name == "mine"
    done = run("fairseq-hydra-train", "--help")
    assert done.stderr == "" and done.stdout.startswith("hydra_train is powered by Hydra.")


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


RUN = {"distributed_training": {"ddp_backend": "c10d"}}
FROM = {"init_from": "none.pt"}


@pytest.mark.parametrize("before, keys, said", rows("hydra"))
def test_other_keys_and_flags_are_refused(before, keys, said):
    given = OmegaConf.to_container(OmegaConf.from_dotlist(shlex.split(keys)))
    with pytest.raises(UsageError) as refused:
        model = given.pop("model", {})
        fill(model, **{**RUN, **given} if given else {})
    assert_says(str(refused.value), said)


def test_settings_of_a_checkpoint_are_left_alone():
    """Earlier versions kept nested keys without a use for them, and the machine may be another."""
    old = OmegaConf.to_container(fill({}))
    old.update(encoder={"layers": 2}, a_flag_of_another_version=1)
    filled = fill(old, distributed_training={"ddp_backend": "fully_sharded"})
    assert filled.encoder_layers == 6 and filled.a_flag_of_another_version == 1


def test_where_a_training_resumes_neither_init_acts(tmp_path, caplog):
    state = {"model": {}, "args": argparse.Namespace(arch=ARCH, deep_init="xavier")}
    torch.save(state, tmp_path / "checkpoint_last.pt")
    flags = {**FROM, "deep_init": "ds", "ds_init_alpha": 0.5}
    with caplog.at_level("INFO"):
        filled = fill(flags, **RUN, checkpoint={"save_dir": str(tmp_path)})
    assert "--deep-init not used; its weights began with deep init xavier" in caplog.text
    assert filled.init_from is None and filled.deep_init == "xavier" and filled.ds_init_alpha is None


def train(data, save, *keys, **options):
    """The ended process of a small training."""
    return run("fairseq-hydra-train", *keys, f"task.data={data}", "task.source_lang=src", "task.target_lang=tgt",
               f"common.user_dir={PACKAGE}", f"checkpoint.save_dir={save}", f"hydra.run.dir={save}/run",
               "common.cpu=true", "dataset.max_tokens=400", "dataset.disable_validation=true",
               "checkpoint.no_epoch_checkpoints=true", **options)  # fmt: skip


EXAMPLE = ("--config-dir", PACKAGE.parent / "examples/hydra", "--config-name", "dlcl", "optimization.max_update=1")
OURS = ("optimizer._name=muon", "+optimizer.muon_momentum=0.9", "criterion._name=fused_label_smoothed_cross_entropy")


def test_the_example_trains_what_nested_keys_say(data, tmp_path):
    """Of examples/hydra/README.md, with our optimizer and criterion."""
    train(data, tmp_path, *EXAMPLE, *OURS, "model.encoder.layers=3", "+model.decoder.embed_dim=16",
          "model.decoder.layers=1", "+model.encoder_embed_dim=16", "+model.encoder.ffn_embed_dim=24",
          "+model.quant_noise.pq_block_size=4", "+model.decoder_layer_agg=residual")  # fmt: skip
    checkpoint = saved(tmp_path)
    state, flags = checkpoint["model"], checkpoint["cfg"]["model"]
    assert state["encoder.history.weight"].shape[:2] == (4, 4) and "decoder.history.weight" not in state
    assert state["encoder.layers.2.fc1.weight"].shape == state["decoder.layers.0.fc1.weight"].shape == (24, 16)
    assert flags["quant_noise_pq_block_size"] == 4 and not {"encoder", "decoder", "quant_noise"} & set(flags)
    assert checkpoint["cfg"]["criterion"]["_name"] == "fused_label_smoothed_cross_entropy"
    assert checkpoint["last_optimizer_state"]["param_groups"][0]["momentum"] == 0.9
    path = tmp_path / "checkpoint_last.pt"
    assert "transformer_dlcl_6l, " in run("fairseq-deep", "check", path).stdout
    assert len(hypotheses(run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", path, "--cpu"))) == 30
    done = train(data, tmp_path / "new", *EXAMPLE, "+model.encoder.layer=1", check=False)
    line = "fairseq_deep: model.encoder.layer: unknown setting (did you mean encoder.layers?); see fairseq-train --help"
    assert done.returncode not in (0, None) and line in done.stderr.splitlines() and "Traceback" not in done.stderr
    assert not list((tmp_path / "new").glob("*.pt"))
