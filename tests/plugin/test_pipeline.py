"""From text to a score through fairseq's own console scripts, with the plugin's flags added.

The model is a depth-wise LSTM with gates that all layers of both stacks share, which every program has to keep.
"""

import argparse
import re

import pytest
import torch

from fairseq_deep.core.native import load
from fairseq_deep.plugin.models import first_look
from tests.helpers.commands import PACKAGE, entries, hypotheses, losses, run, saved, train_command

RDROP = ["--criterion", "fused_label_smoothed_cross_entropy", "--rdrop-alpha", "1"]
GATES = "encoder.history.gates.0.weight"
CPU = ["--user-dir", PACKAGE, "--cpu"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint folder, and what training printed; with R-Drop, which validations leave out."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--max-epoch", "4", "--lstm-share", "gate-encdec", "--num-workers", "1", *RDROP]
    return folder, run(*train_command(data, folder, *flags, arch="transformer_lstm_2l2l_tiny"))


def generate(data, path, *flags, program="fairseq-generate", **options):
    return run(program, data, *CPU, "--path", path, "--beam", "3", "--max-len-b", "12", *flags, **options)


def test_training_learns_and_saves_shared_gates_once(trained):
    folder, done = trained
    values = list(losses(done).values())
    assert len(values) >= 9 and values[-1] < values[0]
    assert {path.name for path in folder.iterdir()} >= {"checkpoint_last.pt", "checkpoint_best.pt", "checkpoint3.pt"}
    assert [name for name in saved(folder)["model"] if re.search(r"\.gates\..*\.weight$", name)] == [GATES]


def test_decode_precision_changes_little_and_the_checkpoint_nothing(data, trained):
    path = trained[0] / "checkpoint_last.pt"
    before, plain = path.read_bytes(), hypotheses(generate(data, path))
    for precision in ("fp32", "bf16", "int8"):
        done = generate(data, path, "--task", "deep_translation", "--decode-precision", precision)
        assert (f"decoder linear layers in {precision}" in done.stderr) == (precision != "fp32")
        of_encoder = "bf16" if precision == "int8" and load() is None else precision
        named = re.findall(r"encoder linear layers in (\w+)", done.stderr)
        assert named == [of_encoder] * (precision != "fp32")
        share = sum(a == b for a, b in zip(hypotheses(done), plain)) / len(plain)
        assert share == 1.0 if precision == "fp32" else share > 0.6
    assert path.read_bytes() == before


def test_interactive_answers_every_line_in_order(data, trained):
    """An empty line gets an answer too, whatever the model makes of it; the recipe's stage 6 makes it empty again."""
    lines = ["1 2 3", "", "4 5 6 7", ""]
    flags = ["--buffer-size", "2", "-s", "src", "-t", "tgt", "--task", "deep_translation", "--decode-precision", "int8"]
    done = generate(data, trained[0] / "checkpoint_last.pt", *flags, program="fairseq-interactive",
                    stdin="\n".join(lines) + "\n")  # fmt: skip
    sources = {int(m[1]): m[2] for m in re.finditer(r"^S-(\d+)\t(.*)$", done.stdout, re.M)}
    assert [sources.get(index, "") for index in range(4)] == lines
    assert len(hypotheses(done)) == 4


@pytest.mark.parametrize("task", [[], ["--task", "translation"]], ids=["", "named task"])
def test_validation_of_a_checkpoint_has_the_loss_of_its_training(task, data, trained):
    folder, done = trained
    flags = [*CPU, "--path", folder / "checkpoint_last.pt", "--max-tokens", "400", "--log-format", "json", *task]
    again = re.search(r'"valid_loss": "([\d.]+)"', run("fairseq-validate", data, *flags).text)
    last = [*entries(done, "valid").values()][-1]
    assert float(again[1]) == pytest.approx(last["loss"], abs=2e-3) and "rdrop_kl" not in last


@pytest.mark.parametrize("flags, kept", [
    ({}, False), ({"lstm_attn_residual": False}, False), ({"lstm_attn_residual": True}, None),
    ({"lstm_merge": "two"}, None), ({"decoder_attn": "merged"}, None), ({"layer_agg": "residual"}, None),
])  # fmt: skip
@pytest.mark.parametrize("start", ["resume", "fine-tune"])
def test_a_model_with_the_older_query_keeps_it(start, flags, kept, tmp_path):
    """Checkpoints from before 2026-11-23 have the query LN(S); the preset of new models would change the function."""
    folder = tmp_path / "save" if start == "resume" else tmp_path
    folder.mkdir(exist_ok=True)
    old = argparse.Namespace(arch="transformer_lstm_6l", **{"layer_agg": "lstm", **flags})
    torch.save({"args": old, "model": {}}, folder / "checkpoint_last.pt")
    new = argparse.Namespace(arch="transformer_lstm_6l", save_dir=str(tmp_path / "save"), restore_file=None,
                             finetune_from_model=str(tmp_path / "checkpoint_last.pt"))  # fmt: skip
    first_look._keep_flags(new)
    assert getattr(new, "lstm_attn_residual", None) is kept
    new.lstm_attn_residual = True
    first_look._keep_flags(new)
    assert new.lstm_attn_residual is True, "a flag of the user counts"
