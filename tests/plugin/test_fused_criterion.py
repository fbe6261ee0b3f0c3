"""``--criterion fused_label_smoothed_cross_entropy`` in fairseq's own training, and ``--fast-dropout``."""

import pytest
import torch

from tests.helpers.commands import PACKAGE, losses, run, train_command

FUSED, STOCK = "fused_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"


def with_criterion(name, command):
    command = list(command)
    command[command.index("--criterion") + 1] = name
    return command


@pytest.mark.parametrize("first, second, flags", [
    (STOCK, FUSED, ["--update-freq", "2"]), (FUSED, STOCK, ["--report-accuracy"]), (FUSED, FUSED, ["--bf16"]),
])  # fmt: skip
def test_a_run_goes_on_with_the_other_criterion(data, tmp_path, first, second, flags):
    whole = losses(run(*train_command(data, tmp_path / "whole", "--max-update", "8", *flags)))
    start = losses(run(*with_criterion(first, train_command(data, tmp_path / "parts", "--max-update", "4", *flags))))
    rest = losses(run(*with_criterion(second, train_command(data, tmp_path / "parts", "--max-update", "8", *flags))))
    assert set(start) == {1, 2, 3, 4} and set(rest) == {5, 6, 7, 8}
    assert {**start, **rest} == pytest.approx(whole, **({"rel": 0.02} if "--bf16" in flags else {"abs": 2e-3}))


def test_with_stock_fairseqs_model(data, tmp_path):
    flags = ["--max-update", "4", "--encoder-layers", "2", "--decoder-layers", "2"]
    expected = losses(run(*train_command(data, tmp_path / "one", *flags, arch="transformer")))
    found = losses(run(*with_criterion(FUSED, train_command(data, tmp_path / "two", *flags, arch="transformer"))))
    assert found == pytest.approx(expected, abs=2e-3)


def test_hydra_knows_it(data, tmp_path):
    run("fairseq-hydra-train", "task=translation", f"task.data={data}", "task.source_lang=src", "task.target_lang=tgt",
        "criterion=label_smoothed_cross_entropy", f"criterion._name={FUSED}", "criterion.label_smoothing=0.1",
        "optimizer=adam", "lr_scheduler=fixed", "optimization.lr=[0.001]", "optimization.max_update=2",
        "dataset.max_tokens=400", "common.cpu=true", f"common.user_dir={PACKAGE}", f"checkpoint.save_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}/run", "+model={_name: transformer_dlcl_2l2l_tiny}")  # fmt: skip
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert state["cfg"]["criterion"]["_name"] == FUSED


@pytest.mark.parametrize("flags", [["--fast-dropout"], ["--fast-dropout", "--checkpoint-activations"]], ids=str)
def test_a_run_with_fast_dropout_goes_on_as_if_it_had_not_stopped(data, tmp_path, flags):
    flags = [*flags, "--dropout", "0.2", "--attention-dropout", "0.2", "--activation-dropout", "0.2"]
    whole = losses(run(*train_command(data, tmp_path / "whole", "--max-update", "6", *flags)))
    start = losses(run(*train_command(data, tmp_path / "parts", "--max-update", "3", *flags)))
    rest = losses(run(*train_command(data, tmp_path / "parts", "--max-update", "6", *flags)))
    assert {**start, **rest} == whole
