"""Checkpoints of earlier versions give the same outputs and the same translations."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict

from fairseq_deep.plugin.models.hydra import fill
from tests.golden.goldens import FOLDER, build, computed, load, model_flags
from tests.helpers.flags import parse

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
