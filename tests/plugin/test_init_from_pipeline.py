"""``--init-from`` from the command line: from a stock model to a deeper one that trains, goes on and translates."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.training import restart
from tests.helpers.commands import PACKAGE, hypotheses, losses, run, train_command

SHALLOW = ["--encoder-layers", "2", "--decoder-layers", "1", "--encoder-normalize-before", "--decoder-normalize-before"]
DEEP = ["--encoder-layers", "3", "--decoder-layers", "2", "--share-all-embeddings"]
SHORT = ["--disable-validation", "--no-epoch-checkpoints"]


def test_a_deeper_model_starts_goes_on_and_translates_without_the_file(data, tmp_path):
    old, save = tmp_path / "stock.pt", tmp_path / "save"
    run(*train_command(data, tmp_path / "old", *SHALLOW, *SHORT, "--max-update", "3", arch="transformer"))
    (tmp_path / "old/checkpoint_last.pt").rename(old)
    for path in data.glob("dict.*.txt"):
        shutil.copy(path, tmp_path)

    def train(updates, *flags, **options):
        flags = [*DEEP, *SHORT, "--init-from", old, "--max-update", updates, *flags]
        return run(*train_command(data, save, *flags, arch="transformer_prenorm_6l"), **options)

    two = ["--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--max-tokens", "200", "--lr", "0"]
    done = train(1, *two, processes=2)
    text = done.stdout + done.stderr
    assert text.count(f"--init-from {old} (transformer): encoder layers 1, 2 twice, decoder layers 1 twice; ") == 1
    assert "own initialisation: none; not copied: none\n" in text  # the dictionaries were there to compare
    state, first = (torch.load(path, weights_only=False) for path in (save / "checkpoint_last.pt", old))
    assert state["cfg"]["model"].init_from is None and str(old) not in str(state["cfg"])
    for name in ("self_attn.q_proj.weight", "fc2.bias"):
        ours, theirs = state["model"][f"encoder.layers.2.{name}"], first["model"][f"encoder.layers.1.{name}"]
        assert torch.equal(ours, theirs)  # a learning rate of 0 leaves what was taken

    old.unlink()
    done = train(2)
    text = done.stdout + done.stderr
    assert f"training resumes from {save}/checkpoint_last.pt: --init-from is not used" in text
    assert list(losses(done)) == [2] and "encoder layers" not in text
    words = [data, "--user-dir", PACKAGE, "--path", save / "checkpoint_last.pt", "--cpu", "--max-len-b", "9"]
    assert len(hypotheses(run("fairseq-generate", *words))) == 30


def test_a_schedule_that_has_ended_is_rejected(monkeypatch):
    monkeypatch.setattr(restart, "_stock", lambda *_: None)
    flags = SimpleNamespace(model=SimpleNamespace(stack_restart_updates=10))
    trainer = SimpleNamespace(cfg=flags, get_num_updates=lambda: 0, set_num_updates=print, get_lr=lambda: 0.0)
    with pytest.raises(UsageError, match="--stack-restart-updates 10: the schedule's learning rate is 0 there; lower"):
        restart.load_checkpoint(trainer, "checkpoint_last.pt")


def test_a_deeper_model_may_start_at_the_peak_of_the_schedule(data, tmp_path):
    old = tmp_path / "old"
    run(*train_command(data, old, *SHALLOW, *SHORT, "--max-update", "3", arch="transformer"))

    def train(folder, updates):
        flags = [*DEEP, *SHORT, "--max-update", updates, "--init-from", old / "checkpoint_last.pt",
                 "--init-from-order", "interleave", "--stack-restart-updates", "4"]  # fmt: skip
        done = run(*train_command(data, tmp_path / folder, *flags, arch="transformer_prenorm_6l"))
        found = re.findall(r"train_inner \| (\{.*\})", done.stdout + done.stderr)
        rates = {int(entry["num_updates"]): float(entry["lr"]) for entry in map(json.loads, found)}
        return done.stdout + done.stderr, rates, losses(done)

    text, whole, trained = train("whole", 8)
    assert "--stack-restart-updates: training starts at update 4, lr 0.002" in text  # the peak, warm-up is 4
    assert whole == pytest.approx({n: 2e-3 * (4 / n) ** 0.5 for n in (5, 6, 7, 8)}, rel=1e-3)
    start, rest = train("parts", 6), train("parts", 8)
    assert {**start[1], **rest[1]} == whole and {**start[2], **rest[2]} == trained and list(rest[1]) == [7, 8]
    assert "begins at" not in rest[0]
