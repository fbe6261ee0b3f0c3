"""``fairseq-deep export``: a plain model becomes a checkpoint that fairseq reads without this package."""

import argparse
import re

import pytest
import torch

from fairseq_deep.tools.fairseq_format import plain_weights
from tests.helpers.commands import PACKAGE, WITHOUT_PLUGIN, hypotheses, run, train_command

DEPTH = ("--encoder-layers", "2", "--decoder-layers", "3", "--max-update", "6")


def generate(data, path, *flags, stock=False):
    words = [data, "--path", path, "--cpu", "--beam", "3", "--max-len-b", "12", *flags]
    return run("fairseq-generate", *words, prepare=WITHOUT_PLUGIN if stock else None)


def export(checkpoint, output):
    return run("fairseq-deep", "export", checkpoint, "--output", output, check=False)


@pytest.mark.parametrize(
    "arch, flags",
    [
        ("transformer_ds_6l", ("--ds-init-alpha", "0.5")),
        ("transformer_dlcl_6l", ("--dlcl-no-norm", "--dlcl-init", "last", "--dlcl-fixed")),
        ("transformer_prores_18l18l", ("--prores-period", "2", "--prores-around", "completep")),
        ("transformer_deepnet_18l18l", ("--share-all-embeddings", "--encoder-learned-pos")),
        ("transformer_admin_18l18l", ("--encoder-learned-pos", "--decoder-learned-pos", "--share-all-embeddings")),
    ],
)
def test_stock_fairseq_generates_the_same_from_the_exported_model(data, tmp_path, arch, flags):
    run(*train_command(data, tmp_path, *DEPTH, *flags, arch=arch))
    ours, stock = tmp_path / "checkpoint_last.pt", tmp_path / "stock.pt"
    done = export(ours, stock)
    assert done.returncode == 0 and done.stdout.strip().endswith("a fairseq transformer")
    expected = hypotheses(generate(data, ours, "--user-dir", PACKAGE))
    assert len(expected) == 30
    assert hypotheses(generate(data, stock, stock=True)) == expected


def test_small_factors_are_not_rounded_to_fp16(build):
    """Factors of 1e-5 and weights of 0.03: a tenth of their products would be 0 in fp16."""
    model = build("transformer_layerscale_18l18l", layerscale_start=1e-5, encoder_layers=2, decoder_layers=1)
    stored = {name: weight if "residual" in name else weight.half() for name, weight in model.state_dict().items()}
    model.load_state_dict(stored)
    matrix = stored["encoder.layers.1.fc2.weight"].float()
    weights = plain_weights("model.pt", model, stored, model.args)
    assert torch.allclose(weights["encoder.layers.1.fc2.weight"], 1e-5 * matrix, rtol=1e-6, atol=0)
    assert weights["encoder.layers.1.fc1.weight"] is stored["encoder.layers.1.fc1.weight"]


def test_checkpoints_of_the_original_code_and_of_hydra_are_exported_whole(data, tmp_path):
    """The version number of the first makes fairseq drop the final norms; ours are there, and so in what we write."""
    run(*train_command(data, tmp_path, *DEPTH, arch="transformer_prenorm_6l"))
    expected = hypotheses(generate(data, tmp_path / "checkpoint_last.pt", "--user-dir", PACKAGE))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    flags = vars(state["cfg"]["model"])
    state["cfg"]["model"] = {name: value for name, value in flags.items() if name != "arch"}
    torch.save(state, tmp_path / "hydra.pt")
    for name in ("encoder", "decoder"):
        state["model"][f"{name}.version"] = torch.Tensor([1])
    del flags["layer_agg"], flags["_name"]
    for arch, name in (("transformer_prenorm_wmt_en_de", "old"), ("dlcl_transformer_prenorm_wmt_en_de", "dlcl")):
        state["cfg"]["model"] = argparse.Namespace(**{**flags, "arch": arch})
        torch.save(state, tmp_path / f"{name}.pt")
    for name in ("hydra", "old"):
        assert export(tmp_path / f"{name}.pt", tmp_path / "stock.pt").returncode == 0
        assert hypotheses(generate(data, tmp_path / "stock.pt", stock=True)) == expected
    done = export(tmp_path / "dlcl.pt", tmp_path / "no.pt")
    assert done.returncode == 2 and "--layer-agg dlcl (encoder)" in done.stderr and done.stderr.count("\n") == 1


def test_our_task_criterion_and_optimizer_get_fairseqs_names(data, tmp_path):
    """Stock fairseq takes all of them when it validates; the optimizer state stays behind, and the input as it was."""
    ours = ["--task", "deep_translation", "--gnmt-lenpen", "--criterion", "fused_label_smoothed_cross_entropy"]
    ours += ["--label-smoothing", "0.1", "--optimizer", "fused_adam"]
    run(*train_command(data, tmp_path, *DEPTH, *ours, arch="transformer_ds_6l"))
    trained, stock = tmp_path / "checkpoint_last.pt", tmp_path / "stock.pt"
    before = trained.read_bytes()
    assert export(trained, stock).returncode == 0 and trained.read_bytes() == before
    words = ["--task", "translation", "--cpu", "--valid-subset", "valid", "--max-tokens", "400"]
    words += ["--log-format", "simple"]
    losses = [
        re.findall(r"\| (loss [\d.]+ \| nll_loss [\d.]+)", done.stdout + done.stderr)
        for done in (
            run("fairseq-validate", data, "--path", trained, "--user-dir", PACKAGE, *words),
            run("fairseq-validate", data, "--path", stock, *words, prepare=WITHOUT_PLUGIN),
        )
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 1
    state = torch.load(stock, weights_only=False)
    flags = vars(state["cfg"]["model"])
    assert "gnmt_lenpen" not in state["cfg"]["task"] and state["last_optimizer_state"] is None
    assert flags["arch"] == "transformer" and not any(name.startswith(("deep_init", "ds_init")) for name in flags)
