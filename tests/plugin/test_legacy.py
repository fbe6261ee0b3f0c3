"""Checkpoints of the original DLCL code: same outputs after its names, flags and keys are translated."""

import argparse
import re

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_deep.cli import main
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.legacy import ALIASES, translate_flags
from tests.helpers.flags import parse
from tests.helpers.models import make_batch, tiny_flags


def old_keys(model, first_norm):
    """The state of *model* under the keys of fairseq 0.5.0, with the history's norms numbered from *first_norm*."""
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(".version")}
    for key in [key for key in state if key.endswith("q_proj.weight") or key.endswith("q_proj.bias")]:
        parts = [state.pop(key.replace("q_proj", f"{role}_proj")) for role in "qkv"]
        state[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    names = {"encoder": ["self_attn", "final"], "decoder": ["self_attn", "encoder_attn", "final"]}
    for side, norms in names.items():
        for number, norm in enumerate(norms):
            for key in [key for key in state if re.match(rf"{side}\.layers\.\d+\.{norm}_layer_norm\.", key)]:
                state[key.replace(f"{norm}_layer_norm", f"layer_norms.{number}")] = state.pop(key)
    moved = {}
    for key in [key for key in state if ".history." in key]:
        value = state.pop(key)
        if key.endswith("history.weight") and first_norm == 1:
            value = value.unsqueeze(-1)
        moved[re.sub(r"layer_norms\.(\d+)", lambda m: f"layer_norms.{int(m[1]) + first_norm}", key)] = value
    state.update(moved)
    del state["decoder.output_projection.weight"]
    return state


@pytest.mark.parametrize("prefix, first_norm, norm", [("", 1, "prenorm"), ("simple_", 0, "postnorm")],
                         ids=["dlcl", "simple_dlcl"])  # fmt: skip
def test_an_original_checkpoint_gives_the_same_output(build, dictionary, tmp_path, prefix, first_norm, norm):
    ours = "transformer_dlcl_6l" if norm == "prenorm" else "transformer_dlcl_postnorm_6l"
    model = build(ours, share_all_embeddings=True, encoder_layers=4, decoder_layers=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    dictionary.save(str(tmp_path / "dict.src.txt"))
    dictionary.save(str(tmp_path / "dict.tgt.txt"))
    args = argparse.Namespace(
        arch=f"{prefix}dlcl_transformer_{norm}_wmt_en_de", task="translation", data=str(tmp_path), source_lang="src",
        target_lang="tgt", left_pad_source="True", left_pad_target="False", share_all_embeddings=True,
        encoder_layers=4, decoder_layers=3, init_value="avg", weight_type="scalar", encoder_learnable=True,
        decoder_learnable=True, normalize_learned_weight=False, normalize_embedding=False, history_dropout=0.0,
        history_window_size=2, relu_dropout=0.0, raw_text=False, max_source_positions=1024, max_target_positions=1024,
        encoder_normalize_before=norm == "prenorm", decoder_normalize_before=norm == "prenorm", lr_scheduler="fixed",
        optimizer="adam", criterion="cross_entropy", adam_betas="(0.9, 0.997)", min_lr=1e-9, **tiny_flags(ours)
    )  # fmt: skip
    history = {"criterion_name": "CrossEntropyCriterion", "best_loss": 1.0, "num_updates": 1,
               "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}  # fmt: skip
    state = {"args": args, "model": old_keys(model, first_norm), "optimizer_history": [history],
             "last_optimizer_state": None, "extra_state": {"epoch": 1, "val_loss": 1.0}}  # fmt: skip
    torch.save(state, tmp_path / "old.pt")
    [loaded], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "old.pt")])
    batch = make_batch(dictionary)
    with torch.no_grad():
        expected, actual = model(*batch)[0], loaded.eval()(*batch)[0]
    torch.testing.assert_close(actual, expected)
    words = ["--data", str(tmp_path), "--output", str(tmp_path / "made")]
    assert main(["package", str(tmp_path / "old.pt"), *words]) == 0
    [packaged], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "made/model.safetensors")])
    with torch.no_grad():
        assert torch.equal(packaged.eval()(*batch)[0], actual)


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
