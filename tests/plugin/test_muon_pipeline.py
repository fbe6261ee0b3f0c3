"""``--optimizer muon`` in fairseq's own training: resuming, precisions, workers, Hydra, checkpoints of Adam."""

import pytest
import torch

from tests.helpers.commands import EXACT, PACKAGE, losses, run, train_command

FLAGS = [*EXACT, "--clip-norm", "1.0", "--weight-decay", "0.01"]


def train(data, folder, *flags, optimizer="muon", **options):
    """The ended command, with *optimizer* instead of Adam."""
    command = train_command(data, folder, *FLAGS, *flags)
    command[command.index("--optimizer") + 1] = optimizer
    return run(*command, **options)


def saved(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def test_a_resumed_training_has_the_same_parameters(small, tmp_path):
    """Bit for bit, with accumulated gradients and dropout; the state has momentum or Adam's moments."""
    common = ["--update-freq", "2", "--dropout", "0.1"]
    whole = losses(train(small, tmp_path / "whole", "--max-update", "6", *common))
    start = losses(train(small, tmp_path / "parts", "--max-update", "3", *common))
    rest = losses(train(small, tmp_path / "parts", "--max-update", "6", *common))
    assert set(start) == {1, 2, 3} and set(rest) == {4, 5, 6} and {**start, **rest} == whole
    one, two = (saved(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(weight, two["model"][name]) for name, weight in one["model"].items())
    states = one["last_optimizer_state"]["state"].values()
    assert {tuple(sorted(state)) for state in states} == {("momentum_buffer",), ("exp_avg", "exp_avg_sq", "step")}
    # four matrices of each attention and two of each feed-forward network, 2 encoder and 2 decoder layers
    assert sum("momentum_buffer" in state for state in states) == 2 * 6 + 2 * 10


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_half_precision_trains_like_fp32(small, tmp_path, precision, exact_losses):
    found = losses(train(small, tmp_path, "--max-update", "5", "--no-save", precision))
    assert found == pytest.approx(exact_losses, abs=0.05)


@pytest.fixture(scope="module")
def exact_losses(small, tmp_path_factory):
    return losses(train(small, tmp_path_factory.mktemp("exact"), "--max-update", "5", "--no-save"))


def test_two_processes_equal_one(small, tmp_path):
    common = ["--max-update", "4", "--disable-validation"]
    alone = losses(train(small, tmp_path / "one", *common, "--update-freq", "2"))
    both = losses(train(small, tmp_path / "two", *common, "--distributed-backend", "gloo", processes=2))
    assert set(alone) == set(both) == {1, 2, 3, 4} and both == pytest.approx(alone, abs=2e-3)
    one, two = (saved(tmp_path / name)["model"] for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_adam_requires_a_reset(small, tmp_path):
    flags = ["--bf16", "--max-update"]
    first = losses(train(small, tmp_path, *flags, "2", optimizer="fused_adam"))
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    done = train(small, tmp_path, *flags, "4", check=False)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and line == (
        "fairseq_deep: the checkpoint's optimizer state does not fit --optimizer muon and the precision: add "
        "--reset-optimizer, or use the checkpoint's flags"
    )
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    rest = losses(train(small, tmp_path, *flags, "4", "--reset-optimizer"))  # fairseq counts updates from 0 again
    assert set(rest) == {1, 2, 3, 4} and max(rest.values()) < max(first.values())
    assert any("momentum_buffer" in state for state in saved(tmp_path)["last_optimizer_state"]["state"].values())


def test_an_architecture_of_fairseq_is_one_line(small, tmp_path):
    command = ["fairseq-train", small, "--user-dir", PACKAGE, "--arch", "transformer_iwslt_de_en", "--optimizer",
               "muon", "--lr", "1e-3", "--max-tokens", "400", "--save-dir", tmp_path / "none", "--cpu"]  # fmt: skip
    done = run(*command, check=False)
    last = [line for line in done.stderr.splitlines() if line.startswith("fairseq_deep: ")]
    assert done.returncode == 1 and len(last) == 1 and "use a deep_ architecture" in last[0]


def test_hydra_knows_it(small, tmp_path):
    run("fairseq-hydra-train", "task=translation", f"task.data={small}", "task.source_lang=src", "task.target_lang=tgt",
        "criterion=cross_entropy", "optimizer=adam", "optimizer._name=muon", "lr_scheduler=fixed",
        "+optimizer.muon_momentum=0.9", "optimization.lr=[0.001]", "optimization.max_update=2",
        "dataset.max_tokens=400", "common.cpu=true", f"common.user_dir={PACKAGE}", f"checkpoint.save_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}/run", "+model={_name: transformer_dlcl_2l2l_tiny}")  # fmt: skip
    state = saved(tmp_path)
    assert state["cfg"]["optimizer"]["_name"] == "muon"
    assert state["last_optimizer_state"]["param_groups"][0]["momentum"] == 0.9
