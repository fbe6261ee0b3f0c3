"""``--optimizer fused_adam`` in fairseq's own training: losses of ``adam``, its checkpoints, workers, Hydra."""

import pytest
import torch

from tests.helpers.commands import EXACT, PACKAGE, losses, run, train_command

FLAGS = [*EXACT, "--clip-norm", "1.0"]


def with_optimizer(name, command):
    command = list(command)
    command[command.index("--optimizer") + 1] = name
    return command


@pytest.mark.parametrize("first, second, flags", [("adam", "fused_adam", []), ("fused_adam", "adam", ["--bf16"])])
def test_a_run_goes_on_with_the_other_optimizer(data, tmp_path, first, second, flags):
    common = [*FLAGS, "--weight-decay", "0.01", *flags]
    whole = losses(run(*train_command(data, tmp_path / "whole", "--max-update", "8", *common)))
    start = losses(run(*with_optimizer(first, train_command(data, tmp_path / "parts", "--max-update", "4", *common))))
    rest = losses(run(*with_optimizer(second, train_command(data, tmp_path / "parts", "--max-update", "8", *common))))
    assert set(start) == {1, 2, 3, 4} and set(rest) == {5, 6, 7, 8}
    assert {**start, **rest} == pytest.approx(whole, **({"rel": 0.02} if flags else {"abs": 2e-3}))


def test_two_processes_in_half_precision_equal_one(data, tmp_path):
    """With the backend that copies gradients into one buffer, and those of W in fp32 beside it."""
    common = ["--max-update", "5", "--memory-efficient-fp16", *FLAGS]
    command = train_command(data, tmp_path / "one", *common, "--update-freq", "2")
    alone = losses(run(*with_optimizer("fused_adam", command)))
    flags = ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    command = train_command(data, tmp_path / "two", *common, *flags)
    both = losses(run(*with_optimizer("fused_adam", command), processes=2))
    assert set(alone) == set(both) == set(range(1, 6))
    assert both == pytest.approx(alone, rel=0.01)
    states = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False) for name in ("one", "two")]
    for side in ("encoder", "decoder"):
        one, two = (state["model"][f"{side}.history.weight"] for state in states)
        assert one.dtype == two.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=0.01, atol=2e-3)


def test_hydra_knows_it(data, tmp_path):
    run("fairseq-hydra-train", "task=translation", f"task.data={data}", "task.source_lang=src", "task.target_lang=tgt",
        "criterion=cross_entropy", "optimizer=adam", "optimizer._name=fused_adam", "lr_scheduler=fixed",
        "optimization.lr=[0.001]", "optimization.max_update=2", "dataset.max_tokens=400", "common.cpu=true",
        f"common.user_dir={PACKAGE}", f"checkpoint.save_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run",
        "+model={_name: transformer_dlcl_2l2l_tiny}")  # fmt: skip
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert state["cfg"]["optimizer"]["_name"] == "fused_adam"
    assert all(values["step"] == 2 for values in state["last_optimizer_state"]["state"].values())


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_learning_rates_of_layers_follow_the_depth(data, tmp_path, precision):
    """With depth-muP, a = 1/2: layers of m = 2 have 0.71 of the rate, and the rest has all of it."""
    common = ["--residual", "completep", "--completep-alpha", "0.5", "--max-update", "1", "--lr", "1e-2", *precision]
    common += [*FLAGS, "--lr-scheduler", "fixed", "--adam-eps", "1e-12"]
    moved = []
    for name, flags in (("all", []), ("scaled", ["--completep-rates"])):
        command = train_command(data, tmp_path / name, *common, *flags, arch="transformer_prenorm_2l2l_tiny")
        run(*with_optimizer("fused_adam", command))
        moved.append(torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)["model"])
    tolerance = {"rtol": 0.01, "atol": 1e-4} if precision else {"rtol": 1e-5, "atol": 1e-6}
    for norm, rate in (("encoder.layers.1.final_layer_norm", 0.5**0.5), ("decoder.layer_norm", 1.0)):
        full, scaled = (state[f"{norm}.bias"].float() for state in moved)  # from 0, by the rate in one update
        torch.testing.assert_close(scaled, rate * full, **tolerance)
        assert full.abs().max() > 1e-3


@pytest.mark.parametrize("flags, words", [
    (["--residual", "completep", "--completep-rates", "--optimizer", "adam"], "requires --optimizer fused_adam"),
    (["--completep-rates", "--optimizer", "fused_adam", "--fp16"], "add --fp16-no-flatten-grads, or use --memory-ef"),
    (["--ddp-backend", "fully_sharded"], "use --ddp-backend pytorch_ddp"),
    (["--fp16"], "use --bf16"),
    (["--fp16", "--bf16"], "exclude each other"),
])  # fmt: skip
def test_what_cannot_be_ends_training_with_one_line(data, tmp_path, flags, words):
    done = run(*train_command(data, tmp_path / "none", *flags), check=False)
    assert done.returncode not in (0, None)
    last = [line for line in done.stderr.splitlines() if line.startswith("fairseq_deep: ")]
    assert len(last) == 1 and words in last[0]
    assert "Traceback" not in done.stderr and not (tmp_path / "none").exists()
