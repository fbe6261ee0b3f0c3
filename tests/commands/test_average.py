"""fairseq-deep average: what is averaged, how exactly, and which checkpoints are chosen."""

import argparse
import os

import pytest
import torch

from fairseq_deep.plugin import compat
from fairseq_deep.tools import average as tool
from tests.helpers.exports import checkpoint


@pytest.fixture
def average(command, tmp_path):
    """average(WORD, ...): the state that the command writes, and what it prints."""

    def average(*words):
        code, *printed = command("average", *words, "--output", tmp_path / "out.pt")
        assert code == 0, printed
        return compat.load_checkpoint(str(tmp_path / "out.pt")), *printed

    return average


def series(folder, *models, **others):
    return [checkpoint(folder / f"{number}.pt", model, **others) for number, model in enumerate(models)]


@pytest.mark.parametrize("dtype, values, mean", [
    (torch.float32, [[1.0, 2.0], [2.0, 4.0], [6.0, 0.0]], [3.0, 2.0]),
    (torch.float16, [[60000.0], [60000.0]], [60000.0]),  # fp16 does not hold their sum
    (torch.bfloat16, [[256.0], [1.0], [1.0]], [86.0]),  # bf16 has no 257: summed in it, the mean would be 85.5
    (torch.float32, [[16777216.0], [1.0], [1.0]], [5592406.0]),  # nor has fp32 2 ** 24 + 1
    (torch.float64, [[0.1], [0.3]], [0.2]),
    (torch.float32, [[0.1, -1e-40, 3e38]] * 3, [0.1, -1e-40, 3e38]),  # equal ones: no bit changes
])  # fmt: skip
def test_the_mean_is_exact_and_keeps_the_precision(average, tmp_path, dtype, values, mean):
    paths = series(tmp_path, *({"w": torch.tensor(value, dtype=dtype)} for value in values))
    found = average("--inputs", *paths)[0]["model"]["w"]
    assert found.dtype == dtype and torch.equal(found, torch.tensor(mean, dtype=dtype))


def test_the_configuration_comes_from_the_last_and_the_optimizer_goes(average, tmp_path):
    first = checkpoint(tmp_path / "1.pt", {"w": torch.zeros(2)}, task_state={"epoch": 1})
    extra = {"train_iterator": {"epoch": 2}, "ema": {"w": torch.ones(2)}, "ema_fp32_params": {}}
    second = checkpoint(tmp_path / "2.pt", {"w": torch.ones(2)}, task_state={"epoch": 2}, extra_state=extra)
    state, printed, _ = average("--inputs", first, second)
    assert state["cfg"]["model"].arch == "transformer_x"
    assert state["task_state"] == {"epoch": 2} and state["optimizer_history"][-1]["num_updates"] == 7
    assert "last_optimizer_state" not in state
    assert state["extra_state"] == {"train_iterator": {"epoch": 2}, "averaged_from": ["1.pt", "2.pt"]}
    assert printed.count("\n") == 1 and f"{first}, {second}" in printed and "without the optimizer state" in printed


def test_other_dropout_is_the_same_function(average, tmp_path):
    flags = {"arch": "transformer_prenorm_6l", "_name": "transformer_prenorm_6l"}
    for name, dropout in (("a", 0.1), ("b", 0.4)):
        cfg = {"model": argparse.Namespace(**flags, dropout=dropout)}
        checkpoint(tmp_path / f"{name}.pt", {"w": torch.ones(2)}, cfg=cfg)
    average("--inputs", tmp_path / "a.pt", tmp_path / "b.pt")


def test_tied_tensors_stay_tied_and_are_averaged_once(average, tmp_path):
    models = []
    for value in (1.0, 3.0):
        shared = torch.full((4, 2), value)
        models.append({"embed": shared, "decoder.embed": shared, "out": shared, "alone": shared.clone(),
                       "empty": torch.zeros(0), "empty too": torch.zeros(0, 2)})  # fmt: skip
    paths = series(tmp_path, *models)
    assert tool.average(paths)[1] == 16  # two distinct tensors of eight values
    model = average("--inputs", *paths)[0]["model"]
    assert list(model) == list(models[0]) and model["empty too"].shape == (0, 2)
    places = {key: value.data_ptr() for key, value in model.items()}
    assert places["embed"] == places["decoder.embed"] == places["out"] != places["alone"]
    assert all(torch.equal(model[key], torch.full((4, 2), 2.0)) for key in list(model)[:4])


def test_what_has_no_mean_is_taken_from_the_last(average, tmp_path):
    scale = {"encoder.layers.3.residual.scale": torch.tensor(0.5)}  # of a growing branch, where it is equal
    paths = series(tmp_path, *({
        "w": torch.tensor([float(number)]), "decoder.version": torch.tensor([3.0]) * number, **scale,
        "steps": torch.tensor([number]), "x._float_tensor": torch.tensor([5.0 if number else float("nan")]),
    } for number in range(2)))  # fmt: skip
    model = average("--inputs", *paths)[0]["model"]
    assert [value.item() for value in model.values()] == [0.5, 3.0, 0.5, 1, 5.0]


def test_a_write_that_fails_leaves_the_old_output(refused, tmp_path, monkeypatch):
    paths = series(tmp_path, {"w": torch.ones(1)})
    (tmp_path / "out.pt").write_text("old")

    def full_disk(_, path):
        with open(path, "w") as file:
            file.write("half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full_disk)
    assert "cannot write" in refused("average", "--inputs", *paths, "--output", tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["0.pt", "out.pt"]


EPOCHS = ("checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt", "checkpoint_1_1500.pt", "checkpoint_2_900.pt",
          "checkpoint_3_300.pt")  # fmt: skip


@pytest.mark.parametrize("flag, chosen", [
    ("--last", ["checkpoint9.pt", "checkpoint10.pt"]),
    ("--last-updates", ["checkpoint_2_900.pt", "checkpoint_1_1500.pt"]),
])  # fmt: skip
def test_the_newest_are_chosen_by_number(average, tmp_path, flag, chosen):
    for number, name in enumerate(EPOCHS):
        checkpoint(tmp_path / name, {"w": torch.tensor([float(number)])})
    os.utime(tmp_path / "checkpoint2.pt", (2e9, 2e9))  # the time of the file plays no part
    state, *_ = average(flag, 2, "--dir", tmp_path)
    assert state["extra_state"]["averaged_from"] == chosen
    assert state["model"]["w"].item() == sum(map(EPOCHS.index, chosen)) / 2


LOW, HIGH = ["9.5000", "4.1230"], ["9.5000", "27.3101"]


@pytest.mark.parametrize("metric, maximize, expected", [
    ("loss", None, LOW), ("nll_loss", None, LOW), ("bleu", None, HIGH), ("loss", False, LOW), ("bleu", True, HIGH),
    ("bleu\x1b[2J", False, LOW), ("quality", True, HIGH), ("quality", False, LOW),
])  # fmt: skip
@pytest.mark.parametrize("older", [False, True])
def test_the_best_are_chosen_by_value_in_the_direction_of_the_metric(
    average, tmp_path, metric, maximize, expected, older
):
    given = {"maximize_best_checkpoint_metric": maximize}
    cfg = {"model": argparse.Namespace(arch="transformer_x"), "checkpoint": given}
    others = {"cfg": None, "args": argparse.Namespace(**given)} if older else {"cfg": cfg}
    for value in ("9.5000", "27.3101", "4.1230"):
        checkpoint(tmp_path / f"checkpoint.best_{metric}_{value}.pt", {"w": torch.zeros(1)}, **others)
    checkpoint(tmp_path / "checkpoint_best.pt", {"w": torch.ones(1)})
    state, printed, warned = average("--best", "2", "--dir", tmp_path)
    assert state["extra_state"]["averaged_from"] == [f"checkpoint.best_{metric}_{value}.pt" for value in expected]
    odd = "fairseq-deep average: warning: the run was configured such that a low bleu\\x1b[2J is better\n"
    assert warned == (odd if "\x1b" in metric else "") and "\x1b" not in printed
