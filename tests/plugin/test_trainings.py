"""Trainings with this package's flags in fairseq's own commands: resumed, in two processes, in half precision.

One row for each combination of features, all of which have to hold for the row to pass.
"""

import re

import pytest
import torch

from tests.helpers.commands import EXACT, PACKAGE, hypotheses, losses, run, train_command

DLCL, LSTM, POST = (f"transformer_{name}_2l2l_tiny" for name in ("dlcl", "lstm", "postnorm"))
SHARED = ["--lstm-share", "gate-encdec"]
MUON = ["--optimizer", "muon", "--clip-norm", "1.0", "--weight-decay", "0.01"]
FUSED_ADAM = ["--optimizer", "fused_adam"]
FUSED_LOSS = ["--criterion", "fused_label_smoothed_cross_entropy"]
RDROP = [*FUSED_LOSS, "--rdrop-alpha", "5"]
DROPOUT = ["--dropout", "0.2", "--attention-dropout", "0.2", "--activation-dropout", "0.2"]
CLIPPED = ["--clip-norm", "1.0", "--weight-decay", "0.01"]
# architecture, flags of all runs, flags of the first and of the second part, how near the losses are
RESUMED = {
    "plain": (DLCL, [], [], [], {"abs": 0}),
    "lstm with shared gates, recomputed": (LSTM, [*SHARED, "--checkpoint-activations"], [], [], {"abs": 0}),
    "muon": (DLCL, [*MUON, "--update-freq", "2", "--dropout", "0.1"], [], [], {"abs": 0}),
    "r-drop, fast dropout, recomputed": (DLCL, [*RDROP, *DROPOUT, "--fast-dropout", "--checkpoint-activations",
                                                "--update-freq", "2"], [], [], {"abs": 0}),
    "r-drop in fp16": (DLCL, [*RDROP, *DROPOUT, "--memory-efficient-fp16"], [], [], {"abs": 0}),
    "fast dropout": (DLCL, [*DROPOUT, "--fast-dropout"], [], [], {"abs": 0}),
    "admin's profile": (POST, ["--deep-init", "admin", "--admin-start", "profile"], [], [], {"abs": 0}),
    "stock to fused": (DLCL, [*CLIPPED, *EXACT, "--update-freq", "2"], [], [*FUSED_ADAM, *FUSED_LOSS], {"abs": 2e-3}),
    # checkpoints have weights in bf16
    "fused to stock in bf16": (DLCL, [*CLIPPED, *EXACT, "--bf16", "--report-accuracy"], [*FUSED_ADAM, *FUSED_LOSS], [],
                               {"rel": 0.02}),
}  # fmt: skip


def saved(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(case, small, tmp_path):
    arch, flags, first, second, near = RESUMED[case]

    def train(folder, updates, *more):
        flags_of_all = ["--max-update", updates, "--no-epoch-checkpoints", "--disable-validation", *flags, *more]
        done = run(*train_command(small, tmp_path / folder, *flags_of_all, arch=arch))
        divergences = re.findall(r'"rdrop_kl": "([\d.]+)"', done.stdout + done.stderr)
        assert bool(divergences) == ("r-drop" in case) and all(float(value) > 0 for value in divergences)
        return losses(done)

    whole, start, rest = train("whole", 6), train("parts", 3, *first), train("parts", 6, *second)
    assert set(start) == {1, 2, 3} and set(rest) == {4, 5, 6} and set(whole) == {1, 2, 3, 4, 5, 6}
    assert {**start, **rest} == pytest.approx(whole, **near)
    if near == {"abs": 0}:
        one, two = (saved(tmp_path / name)["model"] for name in ("whole", "parts"))
        for name, weight in one.items():
            assert torch.equal(weight, two[name]) or name.endswith("_float_tensor"), name  # fairseq's uninitialised one
    states = saved(tmp_path / "parts")["last_optimizer_state"]["state"].values()
    if case == "muon":
        assert {tuple(sorted(state)) for state in states} == {("momentum_buffer",), ("exp_avg", "exp_avg_sq", "step")}
        # four matrices of each attention and two of each feed-forward network, 2 encoder and 2 decoder layers
        assert sum("momentum_buffer" in state for state in states) == 2 * 6 + 2 * 10


LEGACY, PYTORCH = (["--distributed-backend", "gloo", "--ddp-backend", name] for name in ("legacy_ddp", "pytorch_ddp"))
# DDP counts the gradients of a parameter; a re-entrant recomputation would hand in those of shared gates twice
TWO = {
    "dlcl": (DLCL, [], PYTORCH),
    "lstm, legacy": (LSTM, SHARED, [*LEGACY, "--checkpoint-activations"]),
    "lstm, pytorch": (LSTM, SHARED, [*PYTORCH, "--checkpoint-activations"]),
    "muon": (DLCL, MUON, LEGACY),
    "r-drop": (DLCL, RDROP, PYTORCH),
    "fused adam in fp16": (DLCL, [*FUSED_ADAM, "--clip-norm", "1.0", "--memory-efficient-fp16"], LEGACY),
}


@pytest.mark.parametrize("case", TWO)
def test_two_processes_equal_one_with_twice_the_accumulation(case, data, tmp_path):
    arch, flags, distributed = TWO[case]
    flags = ["--max-update", "5", "--disable-validation", *EXACT, *flags]
    alone = losses(run(*train_command(data, tmp_path / "one", *flags, "--update-freq", "2", arch=arch)))
    both = losses(run(*train_command(data, tmp_path / "two", *flags, *distributed, arch=arch), processes=2))
    assert set(both) == set(alone) == set(range(1, 6))
    assert both == pytest.approx(alone, **({"rel": 0.01} if "fp16" in case else {"abs": 2e-3}))
    one, two = (saved(tmp_path / name)["model"] for name in ("one", "two"))
    history = [name for name in one if name.endswith("history.weight")]
    assert len(history) == 2 * (arch == DLCL)
    for name in history:
        assert one[name].dtype == two[name].dtype == torch.float32
        torch.testing.assert_close(one[name], two[name], rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("arch, updates, flags", [
    ("transformer_dlcl_20l", 20, ["--lr", "5e-3"]), ("transformer_lstm_12l12l", 20, ["--lr", "5e-3"]), (DLCL, 5, MUON),
], ids=["dlcl", "lstm", "muon"])  # fmt: skip
def test_half_precision_trains_like_fp32(arch, updates, flags, data, tmp_path):
    """--amp has no effect on a CPU (autocast is tested with the methods)."""
    flags = [*flags, "--max-update", updates, "--no-save", "--disable-validation", *EXACT]
    exact, *reduced = (
        losses(run(*train_command(data, tmp_path, *flags, *more, arch=arch)))
        for more in ((), ("--memory-efficient-fp16",), ("--bf16",))
    )
    assert set(exact) == set(range(1, updates + 1))
    # a model that gives each entry of the vocabulary the same probability has log2(16) = 4 in each update
    assert updates < 20 or max(list(exact.values())[-5:]) < 3.8
    for found in reduced:
        assert found == pytest.approx(exact, abs=0.05)


def test_activation_checkpointing_trains_to_the_same_losses(data, tmp_path):
    flags = ["--max-update", "6", "--dropout", "0.1", "--no-save"]
    plain = losses(run(*train_command(data, tmp_path, *flags)))
    recomputed = losses(run(*train_command(data, tmp_path, *flags, "--checkpoint-activations")))
    assert recomputed == pytest.approx(plain, abs=2e-3)


def test_the_fused_criterion_trains_fairseqs_model(small, tmp_path):
    flags = ["--max-update", "4", "--encoder-layers", "2", "--decoder-layers", "2", "--no-save"]
    expected = losses(run(*train_command(small, tmp_path, *flags, arch="transformer")))
    found = losses(run(*train_command(small, tmp_path, *flags, *FUSED_LOSS, arch="transformer")))
    assert found == pytest.approx(expected, abs=2e-3)


def test_learning_rates_of_layers_follow_the_depth(small, tmp_path):
    """With depth-muP, a = 1/2: layers of m = 2 have 0.71 of the rate, and the rest has all of it."""
    common = ["--residual", "completep", "--completep-alpha", "0.5", "--max-update", "1", "--lr", "1e-2", *FUSED_ADAM,
              "--clip-norm", "1.0", *EXACT, "--lr-scheduler", "fixed", "--adam-eps", "1e-12"]  # fmt: skip
    moved = []
    for name, flags in (("all", []), ("scaled", ["--completep-rates"])):
        run(*train_command(small, tmp_path / name, *common, *flags, arch="transformer_prenorm_2l2l_tiny"))
        moved.append(saved(tmp_path / name)["model"])
    for norm, rate in (("encoder.layers.1.final_layer_norm", 0.5**0.5), ("decoder.layer_norm", 1.0)):
        full, scaled = (state[f"{norm}.bias"] for state in moved)  # from 0, by the rate in one update
        torch.testing.assert_close(scaled, rate * full, rtol=1e-5, atol=1e-6)
        assert full.abs().max() > 1e-3


def test_a_checkpoint_of_adam_requires_a_reset_for_muon(small, tmp_path):
    flags = ["--bf16", "--disable-validation", "--max-update"]
    first = losses(run(*train_command(small, tmp_path, *flags, "2", *FUSED_ADAM)))
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    done = run(*train_command(small, tmp_path, *flags, "4", *MUON), check=False)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == (
        "fairseq_deep: the checkpoint's optimizer state does not fit --optimizer muon and the precision: add "
        "--reset-optimizer, or use the checkpoint's flags"
    )
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    rest = losses(run(*train_command(small, tmp_path, *flags, "4", *MUON, "--reset-optimizer")))
    assert set(rest) == {1, 2, 3, 4} and max(rest.values()) < max(first.values())  # fairseq counts from 0 again
    assert any("momentum_buffer" in state for state in saved(tmp_path)["last_optimizer_state"]["state"].values())


def hydra(data, folder, model, *keys, **options):
    return run("fairseq-hydra-train", "task=translation", f"task.data={data}", "task.source_lang=src",
               "task.target_lang=tgt", "optimizer=adam", "lr_scheduler=fixed", "optimization.lr=[0.001]",
               "dataset.max_tokens=400", "common.cpu=true", f"common.user_dir={PACKAGE}",
               f"checkpoint.save_dir={folder}", f"hydra.run.dir={folder}/run", "checkpoint.no_epoch_checkpoints=true",
               "+model={" + model + "}", *keys, **options)  # fmt: skip


def test_hydra_knows_optimizers_criterion_and_flags(data, tmp_path):
    flags = "_name: transformer_dlcl_2l2l_tiny, encoder_layers: 4, decoder_layer_agg: residual, dlcl_weight_type: "
    criterion = ["criterion=label_smoothed_cross_entropy", "criterion._name=fused_label_smoothed_cross_entropy",
                 "criterion.label_smoothing=0.1"]  # fmt: skip
    hydra(data, tmp_path, flags + "scalar_2", "optimizer._name=fused_adam", "optimization.max_update=2", *criterion)
    state = saved(tmp_path)
    assert state["cfg"]["optimizer"]["_name"] == "fused_adam"
    assert state["cfg"]["criterion"]["_name"] == "fused_label_smoothed_cross_entropy"
    assert all(values["step"] == 2 for values in state["last_optimizer_state"]["state"].values())
    assert state["model"]["encoder.history.weight"].shape == (5, 5, 2)
    assert "decoder.history.weight" not in state["model"]
    words = ["--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu"]
    assert len(hypotheses(run("fairseq-generate", data, *words))) == 30


def test_hydra_starts_a_deeper_model_at_a_later_update_with_muon(small, tmp_path):
    run(*train_command(small, tmp_path / "old", "--max-update", "1", "--encoder-layers", "1", "--disable-validation"))
    old = tmp_path / "old/checkpoint_last.pt"
    sides = ", ".join(f"{side}_{flag}: {value}" for side in ("encoder", "decoder") for flag, value in (
        ("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", 2)))  # fmt: skip
    model = f"_name: {DLCL}, {sides}, share_all_embeddings: true, init_from: {old}, stack_restart_updates: 3"
    keys = ["optimizer._name=muon", "+optimizer.muon_momentum=0.9", "optimization.max_update=4"]
    done = hydra(small, tmp_path, model, *keys, "criterion=cross_entropy", "dataset.disable_validation=true")
    assert "encoder layers 1 twice, decoder layers 1" in done.stdout + done.stderr
    assert "training starts at update 3, lr 0.001" in done.stdout + done.stderr
    state = saved(tmp_path)
    assert state["cfg"]["model"]["init_from"] is None and state["cfg"]["optimizer"]["_name"] == "muon"
    assert state["optimizer_history"][-1]["num_updates"] == 4
    assert state["last_optimizer_state"]["param_groups"][0]["momentum"] == 0.9
