"""Checkpoints of earlier versions, and of the original DLCL code, give the same outputs and translations."""

import argparse
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict

from fairseq_deep.cli import main
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.hydra import fill
from fairseq_deep.plugin.models.legacy import ALIASES, translate_flags
from tests.golden.goldens import FOLDER, build, computed, load, model_flags
from tests.helpers.flags import parse
from tests.helpers.paths import ROOT

NEAR = {"rtol": 1e-5, "atol": 1e-5}
# new models have another value of them than some of the goldens, which keep what they were made with
CHANGED = ["lstm_attn_residual"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.pt")))
def test_a_golden_checkpoint_computes_what_it_did(name):
    golden = load(name)
    args = parse(*golden["flags"])
    vars(args).update({flag: golden["resolved"].get(flag) for flag in CHANGED})
    now = model_flags(args)
    assert {flag: now[flag] for flag in golden["resolved"]} == golden["resolved"]
    for flags in (args, fill(golden["resolved"], name)):  # a new model, and that of a checkpoint
        model = build(flags)
        model.load_state_dict({key: value.clone() for key, value in golden["weights"].items()})
        assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == golden["shapes"]
        found = computed(model, golden["source"], golden["target"])
        torch.testing.assert_close(found["output"], golden["output"], **NEAR)
        for sentence, expected in zip(found["translations"], golden["translations"]):
            assert [words for words, _ in sentence] == [words for words, _ in expected]
            assert [score for _, score in sentence] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_a_checkpoint_without_a_preset_is_not_given_it():
    """Neither in a Hydra configuration, nor with a twin; a new model gets it."""
    resolved = load("lstm")["resolved"]
    config = OmegaConf.create({**resolved, "_name": resolved["arch"], "decoder_input_dim": 8})  # as fairseq fills in
    with open_dict(config):
        ARCH_CONFIG_REGISTRY[resolved["arch"]](config)
    assert config.get("lstm_attn_residual") is None
    twin = {"arch": "deep_transformer", "layer_agg": "lstm"}
    assert getattr(fill(twin, "twin.pt"), "lstm_attn_residual", None) is None
    new = argparse.Namespace(**twin)
    ARCH_CONFIG_REGISTRY["deep_transformer"](new)
    assert new.lstm_attn_residual is True


@torch.no_grad()
@pytest.mark.parametrize("name", ["dlcl", "simple_dlcl"])
def test_an_original_checkpoint_gives_the_same_output(name, dictionary, tmp_path):
    """Pre-norm and post-norm models as fairseq 0.5.0 stored them, each with a batch and what our model computed."""
    path = shutil.copy(ROOT / f"tests/data/original_{name}.pt", tmp_path / "old.pt")
    for side in ("src", "tgt"):
        dictionary.save(str(tmp_path / f"dict.{side}.txt"))
    expected = torch.load(path, weights_only=False)["expected"]
    [loaded], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    actual = loaded.eval()(*expected["batch"])[0]
    torch.testing.assert_close(actual, expected["output"])
    assert main(["package", str(path), "--data", str(tmp_path), "--output", str(tmp_path / "made")]) == 0
    [packaged], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "made/model.safetensors")])
    assert torch.equal(packaged.eval()(*expected["batch"])[0], actual)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_old_name_presets_what_its_new_name_does(alias, caplog):
    args = parse("--arch", alias)
    name, flags = ALIASES[alias]
    presets = {**ARCHITECTURES[name].presets(), **flags}
    assert {flag: getattr(args, flag) for flag in presets} == presets
    assert f"{alias} is called {name} here" in caplog.text


def test_old_flags_become_ours():
    old = argparse.Namespace(
        init_value="one", weight_type="scalar_4", history_dropout=0.2, normalize_learned_weight=True,
        history_window_size=3, encoder_learnable=False, decoder_learnable=False,
    )  # fmt: skip
    translate_flags(old)
    assert (old.dlcl_init, old.dlcl_weight_type, old.dlcl_dropout) == ("one", "scalar_4", 0.2)
    assert old.dlcl_normalize and old.dlcl_fixed
    assert old.dlcl_window == 3
    unmasked = argparse.Namespace(history_window_size=3)
    translate_flags(unmasked)
    assert not hasattr(unmasked, "dlcl_window"), "their window did not mask unless weights were normalised"
