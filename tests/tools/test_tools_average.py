"""fairseq-deep average: what is averaged, how exactly, and which checkpoints are chosen."""

import argparse
import os

import pytest
import torch

from fairseq_deep.plugin import compat
from fairseq_deep.tools import average as tool
from fairseq_deep.tools.main import main
from tests.helpers import commands
from tests.helpers.tools import checkpoint, failing

fails = failing("average")


def series(folder, values, dtype=torch.float32):
    """Save one checkpoint per value in `values`, each with the tensor 'w'; return the paths."""
    return [
        checkpoint(folder / f"in{index}.pt", {"w": torch.tensor(value, dtype=dtype)})
        for index, value in enumerate(values)
    ]


def run(paths, output):
    return main(["average", "--inputs", *map(str, paths), "--output", str(output)])


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        (torch.float32, [[1.0, 2.0], [2.0, 4.0], [6.0, 0.0]], [3.0, 2.0]),
        # The sum, 120000, is more than fp16 holds.
        (torch.float16, [[60000.0], [60000.0]], [60000.0]),
        # bf16 has no 257: summed in bf16, the mean would be 256 / 3 = 85.5.
        (torch.bfloat16, [[256.0], [1.0], [1.0]], [86.0]),
        # fp32 has no 2 ** 24 + 1: summed in fp32, the mean would be 2 ** 24 / 3 = 5592405.5.
        (torch.float32, [[16777216.0], [1.0], [1.0]], [5592406.0]),
        (torch.float64, [[0.1], [0.3]], [0.2]),
    ],
)
def test_mean_is_exact_and_keeps_the_precision(tmp_path, dtype, values, mean):
    assert run(series(tmp_path, values, dtype), tmp_path / "out.pt") == 0
    result = compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]["w"]
    assert result.dtype == dtype
    assert torch.equal(result, torch.tensor(mean, dtype=dtype))


def test_mean_of_equal_checkpoints_changes_no_bit(tmp_path):
    values = torch.randn(50, 7)
    paths = [checkpoint(tmp_path / f"{index}.pt", {"w": values}) for index in range(3)]
    assert run(paths, tmp_path / "out.pt") == 0
    assert torch.equal(compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]["w"], values)


@pytest.mark.parametrize("extra", [None, {}])
def test_a_checkpoint_without_state_of_the_training(tmp_path, extra):
    path = checkpoint(tmp_path / "1.pt", {"w": torch.ones(2)}, extra_state=extra)
    assert run([path], tmp_path / "out.pt") == 0
    assert compat.load_checkpoint(str(tmp_path / "out.pt"))["extra_state"] == {"averaged_from": ["1.pt"]}


def test_configuration_comes_from_the_last_and_the_optimizer_goes(tmp_path, capsys):
    first = checkpoint(tmp_path / "1.pt", {"w": torch.zeros(2)}, task_state={"epoch": 1})
    extra = {"train_iterator": {"epoch": 2}, "ema": {"w": torch.ones(2)}, "ema_fp32_params": {}}
    second = checkpoint(tmp_path / "2.pt", {"w": torch.ones(2)}, task_state={"epoch": 2}, extra_state=extra)
    assert run([first, second], tmp_path / "out.pt") == 0
    state = compat.load_checkpoint(str(tmp_path / "out.pt"))
    assert state["cfg"]["model"].arch == "transformer_x"
    assert state["task_state"] == {"epoch": 2} and state["optimizer_history"][-1]["num_updates"] == 7
    assert "last_optimizer_state" not in state
    assert state["extra_state"] == {"train_iterator": {"epoch": 2}, "averaged_from": ["1.pt", "2.pt"]}
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and f"{first}, {second}" in printed and "without the optimizer state" in printed


def test_ties_stay_tied_and_are_averaged_once(tmp_path):
    paths = []
    for index, value in enumerate((1.0, 3.0)):
        shared = torch.full((4, 2), value)
        model = {"encoder.embed": shared, "decoder.embed": shared, "decoder.out": shared, "alone": shared.clone()}
        paths.append(checkpoint(tmp_path / f"{index}.pt", model))
    state, size = tool.average(paths)
    assert size == 16  # two distinct tensors of eight values
    assert run(paths, tmp_path / "out.pt") == 0
    model = compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]
    assert list(model) == ["encoder.embed", "decoder.embed", "decoder.out", "alone"]
    pointers = {key: value.data_ptr() for key, value in model.items()}
    assert pointers["encoder.embed"] == pointers["decoder.embed"] == pointers["decoder.out"] != pointers["alone"]
    assert all(torch.equal(value, torch.full((4, 2), 2.0)) for value in model.values())


def test_what_has_no_mean_is_taken_from_the_last(tmp_path):
    paths = []
    for index in range(2):
        model = {
            "w": torch.tensor([float(index)]),
            "decoder.version": torch.tensor([3.0]) * index,
            "steps": torch.tensor([index]),
            "embed_positions._float_tensor": torch.tensor([float("nan") if index == 0 else 5.0]),
        }
        paths.append(checkpoint(tmp_path / f"{index}.pt", model))
    assert run(paths, tmp_path / "out.pt") == 0
    model = compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]
    assert model["w"].item() == 0.5
    assert model["decoder.version"].item() == 3.0 and model["steps"].item() == 1
    assert model["embed_positions._float_tensor"].item() == 5.0


def test_branches_that_grow_from_one_checkpoint_to_the_next_are_refused(tmp_path, capsys):
    key = "encoder.layers.3.residual.scale"
    scales = enumerate((0.5, 0.75, 1.0, 1.0))
    paths = [checkpoint(tmp_path / f"{index}.pt", {key: torch.tensor(scale)}) for index, scale in scales]
    error = fails(capsys, "--inputs", *paths[1:3], "--output", tmp_path / "out.pt")
    assert f"prores grow ({key})" in error and str(paths[2]) in error
    assert not (tmp_path / "out.pt").exists()
    for one in (paths[2:], paths[:1]):
        assert run(one, tmp_path / "out.pt") == 0
        scale = compat.load_checkpoint(str(tmp_path / "out.pt"))["model"][key]
        assert float(scale) == (1 if len(one) == 2 else 0.5)


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
def test_nan_or_inf_is_refused_with_its_file(tmp_path, capsys, poison):
    paths = series(tmp_path, [[1.0], [float(poison)], [1.0]])
    error = fails(capsys, "--inputs", *paths, "--output", tmp_path / "out.pt")
    assert f"{paths[1]} holds NaN or Inf in w" in error
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"a": torch.zeros(2)}, "b is missing in it"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(1)}, "c is only in it"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, 2)}, "b is 3x2 in it and 2x3 there"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, 3, dtype=torch.int64)}, "b has another type"),
    ],
)
def test_checkpoints_of_different_models_are_refused(tmp_path, capsys, other, problem):
    first = checkpoint(tmp_path / "1.pt", {"a": torch.zeros(2), "b": torch.zeros(2, 3)})
    second = checkpoint(tmp_path / "2.pt", other)
    error = fails(capsys, "--inputs", first, second, "--output", tmp_path / "out.pt")
    assert f"{second} does not fit {first}: {problem}" in error
    assert sorted(os.listdir(tmp_path)) == ["1.pt", "2.pt"]


def test_different_ties_are_refused(tmp_path, capsys):
    shared = torch.zeros(2)
    first = checkpoint(tmp_path / "1.pt", {"a": shared, "b": shared})
    second = checkpoint(tmp_path / "2.pt", {"a": shared, "b": shared.clone()})
    assert "b has another type, or is tied to another tensor" in fails(
        capsys, "--inputs", first, second, "--output", tmp_path / "out.pt"
    )


def test_empty_tensors_are_not_taken_for_tied(tmp_path):
    paths = [checkpoint(tmp_path / f"{i}.pt", {"a": torch.zeros(0), "b": torch.zeros(0, 2)}) for i in range(2)]
    assert run(paths, tmp_path / "out.pt") == 0
    assert compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]["b"].shape == (0, 2)


def test_same_file_twice_is_refused(tmp_path, capsys):
    first, _ = series(tmp_path, [[1.0], [2.0]])
    os.symlink(first, tmp_path / "link.pt")
    assert "given twice" in fails(capsys, "--inputs", first, first, "--output", tmp_path / "out.pt")
    assert "given twice" in fails(capsys, "--inputs", first, tmp_path / "link.pt", "--output", tmp_path / "out.pt")


def test_missing_or_broken_files_are_named(tmp_path, capsys):
    (good,) = series(tmp_path, [[1.0]])
    output = tmp_path / "out.pt"
    assert "nowhere.pt: no such checkpoint" in fails(capsys, "--inputs", good, "nowhere.pt", "--output", output)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert f"cannot load {tmp_path}/text.pt" in fails(
        capsys, "--inputs", good, tmp_path / "text.pt", "--output", output
    )
    torch.save({"weights": 1}, tmp_path / "other.pt")
    assert "it has no 'model'" in fails(capsys, "--inputs", tmp_path / "other.pt", "--output", output)
    assert "does not exist; create" in fails(capsys, "--inputs", good, "--output", tmp_path / "no" / "out.pt")
    assert not output.exists()


def test_failed_write_leaves_the_old_output(tmp_path, capsys, monkeypatch):
    paths = series(tmp_path, [[1.0], [2.0]])
    output = tmp_path / "out.pt"
    output.write_text("old")

    def full_disk(state, path):
        with open(path, "w") as file:
            file.write("half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full_disk)
    assert "cannot write" in fails(capsys, "--inputs", *paths, "--output", output)
    assert output.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["in0.pt", "in1.pt", "out.pt"]


def test_one_checkpoint_at_a_time_is_in_memory(tmp_path, monkeypatch):
    import weakref

    load, alive = compat.load_checkpoint, []

    def watched(path):
        assert [reference() for reference in alive] == [None] * len(alive)
        state = load(path)
        alive.append(weakref.ref(state["model"]["w"]))
        return state

    monkeypatch.setattr(compat, "load_checkpoint", watched)
    assert run(series(tmp_path, [[1.0], [2.0], [3.0]]), tmp_path / "out.pt") == 0
    assert len(alive) == 3


def epochs(folder, *names):
    for index, name in enumerate(names):
        checkpoint(folder / name, {"w": torch.tensor([float(index)])})


def chosen(folder):
    return compat.load_checkpoint(str(folder / "out.pt"))["extra_state"]["averaged_from"]


def test_last_takes_the_newest_epochs_by_number(tmp_path):
    epochs(tmp_path, "checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt", "checkpoint_11_500.pt")
    os.utime(tmp_path / "checkpoint2.pt", (2e9, 2e9))  # the time of the file plays no part
    assert main(["average", "--last", "2", "--dir", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    assert chosen(tmp_path) == ["checkpoint9.pt", "checkpoint10.pt"]
    assert compat.load_checkpoint(str(tmp_path / "out.pt"))["model"]["w"].item() == 1.5


def test_last_updates_takes_the_newest_by_update(tmp_path):
    epochs(tmp_path, "checkpoint_3_1500.pt", "checkpoint_2_900.pt", "checkpoint_1_300.pt", "checkpoint4.pt")
    assert main(["average", "--last-updates", "2", "--dir", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    assert chosen(tmp_path) == ["checkpoint_2_900.pt", "checkpoint_3_1500.pt"]


@pytest.mark.parametrize(
    ("metric", "maximize", "expected"),
    [
        ("loss", None, ["9.5000", "4.1230"]),
        ("nll_loss", None, ["9.5000", "4.1230"]),
        ("bleu", None, ["9.5000", "27.3101"]),
        ("loss", False, ["9.5000", "4.1230"]),
        ("bleu", True, ["9.5000", "27.3101"]),
        ("bleu", False, ["9.5000", "4.1230"]),
        ("quality", True, ["9.5000", "27.3101"]),
        ("quality", False, ["9.5000", "4.1230"]),
    ],
)
def test_best_goes_by_value_in_the_direction_of_the_metric(tmp_path, metric, maximize, expected):
    for value in ("9.5000", "27.3101", "4.1230"):
        checkpoint(tmp_path / f"checkpoint.best_{metric}_{value}.pt", {"w": torch.zeros(1)}, maximize=maximize)
    checkpoint(tmp_path / "checkpoint_best.pt", {"w": torch.ones(1)})
    assert main(["average", "--best", "2", "--dir", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    assert chosen(tmp_path) == [f"checkpoint.best_{metric}_{value}.pt" for value in expected]


def test_best_warns_of_an_unlikely_direction(tmp_path, capsys):
    checkpoint(tmp_path / "checkpoint.best_bleu\x1b[2J_27.1.pt", {"w": torch.zeros(1)}, maximize=False)
    assert main(["average", "--best", "1", "--dir", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    told = capsys.readouterr()
    assert "warning: the run was configured such that a low bleu\\x1b[2J is better" in told.err
    assert "(checkpoint.best_bleu\\x1b[2J_27.1.pt;" in told.out


def test_best_reads_the_direction_from_older_configurations(tmp_path):
    for value in ("1.0", "2.0"):
        args = argparse.Namespace(maximize_best_checkpoint_metric=True)
        checkpoint(tmp_path / f"checkpoint.best_x_{value}.pt", {"w": torch.zeros(1)}, cfg=None, args=args)
    assert main(["average", "--best", "1", "--dir", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    assert chosen(tmp_path) == ["checkpoint.best_x_2.0.pt"]


def test_wrong_choices_are_refused(tmp_path, capsys):
    output = ("--output", tmp_path / "out.pt")
    epochs(tmp_path, "checkpoint1.pt", "checkpoint2.pt")
    error = fails(capsys, "--last", 3, "--dir", tmp_path, *output)
    assert "has 2 of the 3 epoch checkpoints (checkpointE.pt): checkpoint1.pt, checkpoint2.pt" in error
    error = fails(capsys, "--last-updates", 1, "--dir", tmp_path, *output)
    assert "has 0 of the 1 update checkpoints (checkpoint_E_U.pt): none; use --last 2" in error
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    epochs(tmp_path / "run/checkpoints", "checkpoint_1_500.pt")
    error = fails(capsys, "--last", 3, "--dir", tmp_path / "run/checkpoints", *output)
    assert "(checkpointE.pt): none; use --last-updates 1" in error
    error = fails(capsys, "--last", 3, "--dir", tmp_path / "run", *output)
    assert f"none; use --dir {tmp_path}/run/checkpoints" in error
    assert ": none;" in fails(capsys, "--best", 1, "--dir", tmp_path, *output)
    assert "require --dir" in fails(capsys, "--last", 1, *output)
    assert "require --dir" in fails(capsys, "--inputs", tmp_path / "checkpoint1.pt", "--dir", tmp_path, *output)
    assert "no such directory" in fails(capsys, "--last", 1, "--dir", tmp_path / "no", *output)
    epochs(tmp_path, "checkpoint.best_mystery_1.0.pt")
    assert "cannot tell whether a high or a low mystery" in fails(capsys, "--best", 1, "--dir", tmp_path, *output)
    epochs(tmp_path, "checkpoint.best_loss_1.0.pt")
    assert "different metrics (loss, mystery)" in fails(capsys, "--best", 1, "--dir", tmp_path, *output)
    assert not (tmp_path / "out.pt").exists()


def test_averaged_model_loads_into_fairseq(tmp_path):
    """Two states of a real model with tied embeddings: the average is strict-loadable and equals the mean."""
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary

    from fairseq_deep.plugin.architectures import build_architecture

    dictionary = Dictionary()
    models = [
        build_architecture("transformer_dlcl_2l2l_tiny", dictionary, share_all_embeddings=True) for _ in range(2)
    ]
    paths = [checkpoint(tmp_path / f"{index}.pt", model.state_dict()) for index, model in enumerate(models)]
    commands.run("fairseq-deep", "average", "--inputs", *paths, "--output", tmp_path / "out.pt")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "out.pt"))
    parameters = [dict(model.named_parameters()) for model in models]
    models[1].load_state_dict(state["model"], strict=True)
    for key, first in parameters[0].items():
        second = compat.load_checkpoint(paths[1])["model"][key]
        assert torch.allclose(models[1].state_dict()[key], (first + second) / 2, atol=1e-7), key


ODD = {
    "extra_state is a list": {"extra_state": [1]},
    "cfg is a list": {"cfg": ["model"]},
    "cfg.model is a str": {"cfg": {"model": "transformer"}},
    "cfg.checkpoint is a list": {"cfg": {"checkpoint": [1]}},
    "args are a dict": {"args": {"arch": "x"}},
    "its model is empty": {"model": {}},
    "w is a sparse tensor": {"model": {"w": torch.eye(2).to_sparse()}},
    "w is a meta tensor": {"model": {"w": torch.ones(2, device="meta")}},
    "a parameter has the name 3": {"model": {3: torch.ones(1)}},
}


def test_models_that_compute_another_function_are_not_averaged(tmp_path, capsys):
    flags = {"arch": "transformer_prenorm_6l", "_name": "transformer_prenorm_6l"}
    paths = [
        checkpoint(tmp_path / f"{name}.pt", {"w": torch.ones(2)}, cfg={"model": argparse.Namespace(**flags, **other)})
        for name, other in (("a", {}), ("b", {"dropout": 0.4}), ("c", {"encoder_attention_heads": 4}))
    ]
    assert run(paths[:2], tmp_path / "out.pt") == 0
    assert run(paths, tmp_path / "no.pt") == 2 and not (tmp_path / "no.pt").exists()
    said = f"{paths[2]} does not fit {paths[0]}: --encoder-attention-heads 4 (a.pt: 8); average checkpoints of one run"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["average", "export", "plot"])
@pytest.mark.parametrize("problem", ODD)
def test_odd_checkpoints_are_one_line(tmp_path, capsys, problem, command):
    others = dict(ODD[problem])
    path = checkpoint(tmp_path / "odd.pt", others.pop("model", {"w": torch.ones(2)}), **others)
    output = tmp_path / "out.png"
    words = {
        "average": ["average", "--inputs", path, "--output", output], "export": ["export", path, "--output", output],
        "plot": ["plot", "weights", path, "--output", output],
    }[command]  # fmt: skip
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and f"{path} is not a complete fairseq checkpoint: " in captured.err
    assert problem in captured.err and not output.exists()
