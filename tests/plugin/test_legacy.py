"""Checkpoints of the original DLCL code: same outputs after its names, flags and keys are translated."""

import argparse
import shutil

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_deep.cli import main
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.legacy import ALIASES, translate_flags
from tests.helpers.flags import parse
from tests.helpers.paths import ROOT


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
