"""Trainings with this package's flags in fairseq's own commands: resumed, in two processes, in half precision.

One row for each combination of features, all of which have to hold for the row to pass.
"""

import shutil

import pytest
import torch

from tests.helpers.commands import EXACT, entries, losses, run, saved, train_command

DLCL, LSTM, POST = (f"transformer_{name}_2l2l_tiny" for name in ("dlcl", "lstm", "postnorm"))
SHARED = ["--lstm-share", "gate-encdec"]
MUON = ["--optimizer", "muon", "--clip-norm", "1.0", "--weight-decay", "0.01"]
FUSED_ADAM = ["--optimizer", "fused_adam"]
RDROP = ["--criterion", "fused_label_smoothed_cross_entropy", "--rdrop-alpha", "5"]
DROPOUT = ["--dropout", "0.2", "--attention-dropout", "0.2", "--activation-dropout", "0.2"]
LOGGED = ["--log-depth-interval", "1"]
NAMES = ("loss", "lr", "gnorm", "ratio_", "between_", "dlcl_", "lstm_", "rdrop_kl")  # of what a log is compared by
RESUMED = {
    "lstm with shared gates, recomputed": (LSTM, [*SHARED, "--checkpoint-activations", *LOGGED]),
    "muon": (DLCL, [*MUON, "--update-freq", "2", "--dropout", "0.1"]),
    "r-drop, fast dropout, recomputed": (DLCL, [*RDROP, *DROPOUT, "--fast-dropout", "--checkpoint-activations",
                                                *LOGGED]),
    "ema in bf16": (DLCL, [*FUSED_ADAM, "--bf16", "--skip-remainder-batch", "--store-ema", "--ema-update-freq", "2"]),
    "r-drop in fp16": (DLCL, [*RDROP, *DROPOUT, "--memory-efficient-fp16"]),
    "admin's profile, cooldown": (POST, ["--deep-init", "admin", "--admin-start", "profile",
                                         "--lr-scheduler", "inverse_sqrt_cooldown", "--cooldown-updates", "2"]),
}  # fmt: skip


def logged(entry):
    return {name: value for name, value in entry.items() if name.startswith(NAMES)}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_continues_as_an_uninterrupted_one(case, small, tmp_path):
    """Losses, rates and the log of depth, and all weights at the end; from a checkpoint in the middle of an epoch."""
    arch, flags = RESUMED[case]

    def train(folder, *more):
        flags_of_all = ["--max-update", "6", "--no-epoch-checkpoints", "--disable-validation", *flags, *more]
        return entries(run(*train_command(small, tmp_path / folder, *flags_of_all, arch=arch)))

    whole = train("whole", "--save-interval-updates", "1")
    middle = min((tmp_path / "whole").glob("checkpoint_*_[34].pt"))
    (tmp_path / "parts").mkdir()
    shutil.copy(middle, tmp_path / "parts/checkpoint_last.pt")
    rest = train("parts")
    assert [*whole] == [1, 2, 3, 4, 5, 6] and [*rest] == [*whole][int(middle.stem[-1]) :]
    for update, entry in rest.items():
        assert (entry.get("rdrop_kl", 0) > 0) == ("r-drop" in case) and ("gnorm_enc_1" in entry) == (LOGGED[0] in flags)
        assert logged(entry) == logged(whole[update])
    one, two = (saved(tmp_path / name) for name in ("whole", "parts"))
    parts = [(state["model"], state["extra_state"].get("ema", {})) for state in (one, two)]
    for weights, others, name in ((*pair, name) for pair in zip(*parts) for name in pair[0]):
        equal = torch.equal(weights[name], others[name])
        assert equal or name.endswith("_float_tensor"), name  # fairseq's, which is not initialised
    assert "cooldown" not in case or [whole[update]["lr"] for update in (3, 4, 5, 6)] == [1.5e-3, 2e-3, 1e-3, 0]


LEGACY, PYTORCH = (["--distributed-backend", "gloo", "--ddp-backend", name] for name in ("legacy_ddp", "pytorch_ddp"))
# DDP counts the gradients of a parameter; a re-entrant recomputation would hand in those of shared gates twice
TWO = {
    "dlcl, r-drop": (DLCL, [*RDROP, *LOGGED], PYTORCH),
    "lstm, legacy": (LSTM, SHARED, [*LEGACY, "--checkpoint-activations"]),
    "lstm, pytorch": (LSTM, SHARED, [*PYTORCH, "--checkpoint-activations"]),
    "muon": (DLCL, [*MUON, *LOGGED], LEGACY),
    "fused adam in fp16": (DLCL, [*FUSED_ADAM, "--clip-norm", "1.0", "--memory-efficient-fp16"], LEGACY),
}


@pytest.mark.parametrize("case", TWO)
def test_two_processes_equal_one_with_twice_the_accumulation(case, data, tmp_path):
    arch, flags, distributed = TWO[case]
    flags = ["--max-update", "5", "--disable-validation", *EXACT, *flags]
    alone = entries(run(*train_command(data, tmp_path / "one", *flags, "--update-freq", "2", arch=arch)))
    both = entries(run(*train_command(data, tmp_path / "two", *flags, *distributed, arch=arch), processes=2))
    assert [*both] == [*alone] == list(range(1, 6)) and ("gnorm_enc_1" in both[1]) == (LOGGED[0] in flags)
    near = {"rel": 0.01} if "fp16" in case else {"rel": 2e-3, "abs": 2e-3}
    for update, entry in both.items():
        assert logged(entry) == pytest.approx(logged(alone[update]), **near)
    one, two = (saved(tmp_path / name)["model"] for name in ("one", "two"))
    history = [name for name in one if name.endswith("history.weight")]
    assert len(history) == 2 * (arch == DLCL)
    for name in history:
        assert one[name].dtype == two[name].dtype == torch.float32
        torch.testing.assert_close(one[name], two[name], rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("arch, updates, flags", [
    (DLCL, 5, MUON), *(pytest.param(arch, 20, ["--lr", "5e-3"], marks=pytest.mark.nightly)
                       for arch in ("transformer_dlcl_20l", "transformer_lstm_12l12l")),
], ids=["muon", "dlcl", "lstm"])  # fmt: skip
def test_half_precision_trains_like_fp32(arch, updates, flags, data, tmp_path):
    """--amp has no effect on a CPU (autocast is tested with the methods)."""
    flags = [*flags, "--max-update", updates, "--no-save", "--disable-validation", *EXACT]
    exact, *reduced = (
        losses(run(*train_command(data, tmp_path, *flags, *more, arch=arch)))
        for more in ((), ("--memory-efficient-fp16",), ("--bf16",))
    )
    assert [*exact] == [*range(1, updates + 1)] and all(found == pytest.approx(exact, abs=0.05) for found in reduced)
