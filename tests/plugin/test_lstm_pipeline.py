"""The depth-wise LSTM through fairseq's own console scripts, with gates that all layers of both stacks share."""

import argparse
import sys

import pytest
import torch

from fairseq_deep.plugin.models import first_look
from tests.helpers.commands import (
    EXACT,
    PACKAGE,
    assert_reduced_precision_trains_like_fp32,
    hypotheses,
    losses,
    run,
    train_command,
)

SHARED = ("--lstm-share", "gate-encdec")


def command(data, folder, *flags, arch="transformer_lstm_2l2l_tiny"):
    return train_command(data, folder, *flags, arch=arch)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint folder, and what training printed."""
    folder = tmp_path_factory.mktemp("lstm")
    return folder, run(*command(data, folder, "--max-epoch", "3", *SHARED))


def test_training_learns_and_saves_shared_gates_once(trained):
    folder, done = trained
    values = list(losses(done).values())
    assert len(values) >= 9 and values[-1] < values[0]
    names = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
    assert [name for name in names if ".gates." in name and name.endswith(".weight")] == [
        "encoder.history.gates.0.weight"
    ]


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(data, tmp_path):
    whole = losses(run(*command(data, tmp_path / "whole", "--max-update", "12", *SHARED)))
    first = losses(run(*command(data, tmp_path / "parts", "--max-update", "6", *SHARED)))
    second = losses(run(*command(data, tmp_path / "parts", "--max-update", "12", *SHARED)))
    assert min(second) == 7 and set(whole) == set(range(1, 13))
    assert {**first, **second} == whole


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_processes_with_recomputed_activations_equal_one_without(data, tmp_path, backend):
    """DDP counts the gradients of a parameter; a re-entrant recomputation would hand in those of the gates twice."""
    flags = ("--max-update", "5", *EXACT, *SHARED)
    alone = losses(run(*command(data, tmp_path / "one", *flags, "--update-freq", "2")))
    distributed = ("--distributed-backend", "gloo", "--ddp-backend", backend, "--checkpoint-activations")
    both = losses(run(*command(data, tmp_path / "two", *flags, *distributed), processes=2))
    assert set(both) == set(alone) == set(range(1, 6))
    assert both == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("arch", ["transformer_lstm_12l12l", "transformer_rnn_6l"], ids=["lstm", "rnn"])
def test_reduced_precision_trains_on_the_cpu(arch, data, tmp_path):
    assert_reduced_precision_trains_like_fp32(data, tmp_path, arch)


def test_average_and_generate(data, trained, tmp_path):
    folder, _ = trained
    run("fairseq-deep", "average", "--last", "2", "--dir", folder, "--output", tmp_path / "average.pt")
    averaged = torch.load(tmp_path / "average.pt", weights_only=False)["model"]
    parts = [torch.load(folder / f"checkpoint{epoch}.pt", weights_only=False)["model"] for epoch in (2, 3)]
    gates = "encoder.history.gates.0.weight"
    torch.testing.assert_close(averaged[gates], (parts[0][gates] + parts[1][gates]) / 2)
    assert averaged.keys() == parts[0].keys()
    common = [data, "--user-dir", PACKAGE, "--beam", "4", "--cpu", "--max-len-b", "10", "--path"]
    assert len(hypotheses(run("fairseq-generate", *common, tmp_path / "average.pt"))) == 30
    pair = f"{folder / 'checkpoint2.pt'}:{folder / 'checkpoint3.pt'}"
    assert len(hypotheses(run("fairseq-generate", *common, pair))) == 30


def test_from_pretrained_translates(data, trained):
    folder, _ = trained
    program = (
        "from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel as M\n"
        f"m = M.from_pretrained({str(folder)!r}, 'checkpoint_last.pt', data_name_or_path={str(data)!r})\n"
        "model = m.models[0]\n"
        "assert model.encoder.aggregator.gates is model.decoder.aggregator.gates\n"
        "print('TRANSLATION', m.translate('1 2 3'))"
    )
    assert "TRANSLATION" in run(sys.executable, "-c", program).stdout


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--decoder-ffn-embed-dim", "32"], "--decoder-ffn-embed-dim has no effect"),
        (["--encoder-layerdrop", "0.1"], "omit --encoder-layerdrop"),
        (["--lstm-merge", "two", "--lstm-share", "all"], "--lstm-share gate or none"),
        (["--lstm-hidden", "7"], "--lstm-hidden 7"),
    ],
)
def test_wrong_flags_end_fairseq_train_with_one_line(data, tmp_path, flags, words):
    done = run(*command(data, tmp_path / "none", *flags), check=False)
    assert done.returncode not in (0, None)
    last = [line for line in done.stderr.splitlines() if line.startswith("fairseq_deep: ")]
    assert len(last) == 1 and words in last[0]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "none").glob("*.pt"))


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
