"""From text to a score through fairseq's own console scripts, with the plugin's flags added."""

import re
import sys

import pytest
import torch

from tests.helpers.commands import (
    EXACT,
    PACKAGE,
    assert_reduced_precision_trains_like_fp32,
    hypotheses,
    losses,
    run,
    train_command,
)

UPDATES = 12


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint folder of a 30-layer model, and what training printed."""
    folder = tmp_path_factory.mktemp("trained")
    done = run(*train_command(data, folder, "--max-epoch", "3", arch="transformer_dlcl_30l"))
    return folder, done


def test_training_learns_and_writes_checkpoints(trained):
    folder, done = trained
    values = list(losses(done).values())
    assert len(values) >= 9
    assert values[-1] < values[0]
    assert {path.name for path in folder.iterdir()} >= {"checkpoint_last.pt", "checkpoint_best.pt", "checkpoint3.pt"}
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    assert state["model"]["encoder.history.weight"].shape == (31, 31)


@pytest.mark.parametrize("flags", [(), ("--checkpoint-activations",)], ids=["plain", "recompute"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(data, tmp_path, flags):
    whole = losses(run(*train_command(data, tmp_path / "whole", "--max-update", UPDATES, *flags)))
    first = losses(run(*train_command(data, tmp_path / "parts", "--max-update", UPDATES // 2, *flags)))
    second = losses(run(*train_command(data, tmp_path / "parts", "--max-update", UPDATES, *flags)))
    assert set(whole) == set(range(1, UPDATES + 1))
    assert max(first) == UPDATES // 2 and min(second) == UPDATES // 2 + 1
    assert {**first, **second} == whole


def test_activation_checkpointing_trains_to_the_same_losses(data, tmp_path):
    flags = ["--max-update", "6", "--dropout", "0.1"]
    plain = losses(run(*train_command(data, tmp_path / "a", *flags)))
    recomputed = losses(run(*train_command(data, tmp_path / "b", *flags, "--checkpoint-activations")))
    assert recomputed == pytest.approx(plain, abs=2e-3)


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_processes_equal_one_with_twice_the_accumulation(data, tmp_path, backend):
    exact = ["--max-update", "5", *EXACT]
    alone = losses(run(*train_command(data, tmp_path / "one", *exact, "--update-freq", "2")))
    flags = ["--distributed-backend", "gloo", "--ddp-backend", backend]
    both = run(*train_command(data, tmp_path / "two", *exact, *flags), processes=2)
    assert set(losses(both)) == set(alone) == set(range(1, 6))
    assert losses(both) == pytest.approx(alone, abs=2e-3)


def test_reduced_precision_trains_on_the_cpu(data, tmp_path):
    assert_reduced_precision_trains_like_fp32(data, tmp_path, "transformer_dlcl_20l")


def test_generate_with_one_model_and_with_an_ensemble(data, trained):
    folder, _ = trained
    common = [data, "--user-dir", PACKAGE, "--beam", "4", "--cpu", "--max-len-b", "10"]
    single = run("fairseq-generate", *common, "--path", folder / "checkpoint_last.pt")
    assert len(hypotheses(single)) == 30
    pair = f"{folder / 'checkpoint2.pt'}:{folder / 'checkpoint3.pt'}"
    assert len(hypotheses(run("fairseq-generate", *common, "--path", pair))) == 30


def test_average_generate_and_score(data, trained, tmp_path):
    folder, _ = trained
    run("fairseq-deep", "average", "--last", "2", "--dir", folder, "--output", tmp_path / "average.pt")
    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", tmp_path / "average.pt", "--cpu")
    (tmp_path / "out").write_text(done.stdout)
    scored = run("fairseq-deep", "score", "--generate-output", tmp_path / "out", "--hypotheses", tmp_path / "sys",
                 "--references", tmp_path / "ref")  # fmt: skip
    again = run("fairseq-deep", "score", "--sys", tmp_path / "sys", "--ref", tmp_path / "ref")
    assert re.search(r"^BLEU = \d+\.\d\d$", scored.stdout, re.M)
    assert scored.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]
    assert len((tmp_path / "sys").read_text().splitlines()) == 30


def test_interactive_answers_every_line_in_order(data, trained):
    """An empty line gets an answer too, whatever the model makes of it; the recipe's stage 6 makes it empty again."""
    folder, _ = trained
    lines = ["1 2 3", "", "4 5 6 7", ""]
    done = run("fairseq-interactive", data, "--user-dir", PACKAGE, "--path", folder / "checkpoint_last.pt", "--cpu",
               "--buffer-size", "2", "-s", "src", "-t", "tgt", stdin="\n".join(lines) + "\n")  # fmt: skip
    sources = {int(m[1]): m[2] for m in re.finditer(r"^S-(\d+)\t(.*)$", done.stdout, re.M)}
    assert [sources.get(index, "") for index in range(4)] == lines
    assert len(hypotheses(done)) == 4


def test_validate(data, trained):
    folder, _ = trained
    done = run("fairseq-validate", data, "--user-dir", PACKAGE, "--path", folder / "checkpoint_last.pt", "--task",
               "translation", "--max-tokens", "400", "--cpu")  # fmt: skip
    assert "loss" in done.stdout + done.stderr


def test_from_pretrained_translates(data, trained):
    folder, _ = trained
    program = (
        "from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel as M\n"
        f"m = M.from_pretrained({str(folder)!r}, 'checkpoint_last.pt', data_name_or_path={str(data)!r})\n"
        "print('TRANSLATION', m.translate('1 2 3'))"
    )
    assert "TRANSLATION" in run(sys.executable, "-c", program).stdout


def test_hydra_train_keeps_the_plugins_flags(data, trained, tmp_path):
    flags = "encoder_layers: 4, decoder_layer_agg: residual, dlcl_weight_type: scalar_2"
    run("fairseq-hydra-train", "task=translation", f"task.data={data}", "task.source_lang=src", "task.target_lang=tgt",
        "criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed", "optimization.lr=[0.001]",
        "optimization.max_update=2", "dataset.max_tokens=400", "common.cpu=true", f"common.user_dir={PACKAGE}",
        f"checkpoint.save_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run",
        "+model={_name: transformer_dlcl_2l2l_tiny, " + flags + "}")  # fmt: skip
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    assert state["encoder.history.weight"].shape == (5, 5, 2)
    assert "decoder.history.weight" not in state
    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu")
    assert len(hypotheses(done)) == 30


def hydra_example(data, save, *keys, **options):
    """The command of examples/hydra/README.md, on the small data."""
    return run("fairseq-hydra-train", "--config-dir", PACKAGE.parent / "examples/hydra", "--config-name", "dlcl",
               f"common.user_dir={PACKAGE}", f"task.data={data}", "task.source_lang=src", "task.target_lang=tgt",
               f"checkpoint.save_dir={save}", f"hydra.run.dir={save}/run", "common.cpu=true",
               "optimization.max_update=1", "dataset.max_tokens=400", *keys, **options)  # fmt: skip


def test_the_example_for_hydra_trains_what_nested_keys_say(data, tmp_path):
    hydra_example(data, tmp_path, "model.encoder.layers=3", "+model.decoder.embed_dim=16",
                  "+model.encoder_embed_dim=16", "model.decoder.layers=1", "+model.encoder.ffn_embed_dim=24",
                  "+model.quant_noise.pq_block_size=4")  # fmt: skip
    path = tmp_path / "checkpoint_last.pt"
    saved = torch.load(path, weights_only=False)
    state, flags = saved["model"], saved["cfg"]["model"]
    assert state["encoder.history.weight"].shape[:2] == (4, 4) and state["decoder.history.weight"].shape[:2] == (2, 2)
    assert state["encoder.layers.2.fc1.weight"].shape == state["decoder.layers.0.fc1.weight"].shape == (24, 16)
    assert flags["quant_noise_pq_block_size"] == 4 and not {"encoder", "decoder", "quant_noise"} & set(flags)
    assert "transformer_dlcl_6l, " in run("fairseq-deep", "check", path).stdout
    assert len(hypotheses(run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", path, "--cpu"))) == 30


def test_hydra_refuses_an_unknown_key_in_one_line(data, tmp_path):
    done = hydra_example(data, tmp_path, "+model.encoder.layer=1", check=False)
    line = "fairseq_deep: model.encoder.layer: unknown setting (did you mean encoder.layers?); see fairseq-train --help"
    assert done.returncode not in (0, None) and line in done.stderr.splitlines()
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--layer-agg", "dclc"], "did you mean dlcl?"),
        (["--layer-agg", "linear", "--encoder-layerdrop", "0.1"], "omit --encoder-layerdrop"),
        (["--dlcl-weight-type", "scalar_3"], "does not divide the width"),
        (["--dlcl-window", "0"], "--dlcl-window 0"),
        (["--eval-bleu", "--eval-bleu-args", '{"max_len_b": 0}'], "use a higher max_len_b"),
        (["--tensorboard-logdir", "/dev/null/logs"], "--tensorboard-logdir /dev/null/logs: cannot write there"),
    ],
)
def test_wrong_flags_end_fairseq_train_with_one_line(data, tmp_path, flags, words):
    done = run(*train_command(data, tmp_path / "none", *flags), check=False)
    assert done.returncode not in (0, None)
    last = [line for line in done.stderr.splitlines() if line.startswith("fairseq_deep: ")]
    assert len(last) == 1 and words in last[0]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "none").glob("*.pt"))


def test_a_checkpoint_of_another_architecture_ends_training_with_one_line(data, trained):
    folder, _ = trained
    before = {path.name: path.stat().st_mtime for path in folder.glob("*.pt")}
    done = run(*train_command(data, folder, arch="transformer_prenorm_6l"), check=False)
    assert done.returncode not in (0, None)
    assert "another architecture" in done.stderr.splitlines()[-1]
    done = run(*train_command(data, folder, arch="transformer"), check=False)  # fairseq's own
    assert "has the architecture transformer_dlcl_30l, and --arch is transformer," in done.stderr.splitlines()[-1]
    flags = ["--finetune-from-model", folder / "checkpoint_last.pt"]
    done = run(*train_command(data, folder / "other", *flags, arch="transformer_postnorm_2l2l_tiny"), check=False)
    assert "its encoder is pre-norm, the model's encoder is post-norm" in done.stderr.splitlines()[-1]
    assert "--init-from" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert {path.name: path.stat().st_mtime for path in folder.glob("*.pt")} == before


def test_a_checkpoint_that_does_not_fit_is_one_line_where_a_run_resumes(small, tmp_path):
    """fairseq's trainer would say that the architectures do not match, in a traceback."""
    run(*train_command(small, tmp_path, "--max-update", "1"))
    done = run(*train_command(small, tmp_path, "--max-update", "2", "--encoder-layers", "3"), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fairseq_deep: the checkpoint has another architecture")


def test_deep_init_is_not_used_where_training_goes_on(data, tmp_path):
    short = ["--disable-validation", "--no-epoch-checkpoints"]
    run(*train_command(data, tmp_path, *short, "--max-update", "1", "--deep-init", "xavier"))
    done = run(*train_command(data, tmp_path, *short, "--max-update", "2", "--deep-init", "lipschitz"))
    path = tmp_path / "checkpoint_last.pt"
    text = done.stdout + done.stderr
    line = f"training resumes from {path}: --deep-init not used; its weights began with deep init xavier"
    assert text.count(line) == 1
    assert torch.load(path, weights_only=False)["cfg"]["model"].deep_init == "xavier"


def test_validation_needs_no_task(data, trained):
    folder, _ = trained
    done = run("fairseq-validate", data, "--user-dir", PACKAGE, "--path", folder / "checkpoint_last.pt", "--cpu",
               "--max-tokens", "400")  # fmt: skip
    assert "valid" in done.stdout + done.stderr and "loss" in done.stdout + done.stderr
