"""fairseq-deep diagnose: its measurements, their data and the printed tables."""

import argparse
import json
import sys

import pytest
import torch

from fairseq_deep.plugin import compat
from fairseq_deep.tools import diagnose, measuring
from tests.helpers.commands import FEED_FORWARD, NARROW, run, train_command
from tests.helpers.methods import DLCL
from tests.helpers.models import POSTNORM as POST

LSTM = "transformer_lstm_2l2l_tiny"
COMMON = [*NARROW, *FEED_FORWARD, "--cpu"]


@pytest.fixture
def measure(command, small, tmp_path):
    """measure(WORD, ...): what the command writes as JSON, and the lines that it prints."""

    def measure(*words):
        code, out, errors = command("diagnose", small, *words, "--json", tmp_path / "out.json")
        assert code == 0, errors
        return json.loads((tmp_path / "out.json").read_text()), out.splitlines()

    return measure


@pytest.fixture
def first(measure):
    """first(WORD, ...): the measurements of the first model."""
    return lambda *words: measure(*words)[0]["models"][0]


def test_the_tables_show_what_is_measured(measure, small):
    record, lines = measure("--arch", POST, "--arch", DLCL, *COMMON, "--tokens", "100", "--seeds", "2")
    batch = record["models"][0]["batch"]
    head = f"{batch['sentences']} sentences of train, {batch['target_tokens']} target tokens; train mode; 2 seeds"
    assert lines[0] == head and 100 <= batch["target_tokens"] < 110  # sentences have at most 9 tokens
    assert set(record["versions"]) == {"fairseq_deep", "fairseq", "torch", "python"}
    assert record["command"] == ["fairseq-deep", *sys.argv[1:]]
    second_layer = [line.split() for line in lines if line.startswith("  2  ")]
    mean = record["models"][1]["mean"]  # pre-norm: its streams differ from layer to layer
    columns = (mean["gradient_norm"], 1), (mean["stream_std"], 2), (mean["stream_between"], 2)
    numbers = [values[side][layer] for side in ("encoder", "decoder") for values, layer in columns]
    assert second_layer[1] == ["2", *map(diagnose._number, numbers)]
    for model, name in zip(record["models"], (POST, DLCL)):
        mean, norms = model["mean"], model["mean"]["gradient_norm"]
        told = f"{name}: {model['parameters']:,} parameters, loss {mean['loss']:.3f}"
        assert f"{told}, source gain {mean['source_gain']:.3f}" in lines
        assert model["name"] == name and [entry["seed"] for entry in model["seeds"]] == [1, 2]
        assert len(norms["encoder"]) == len(norms["decoder"]) == 2 and min(norms["encoder"] + norms["decoder"]) > 0
    table = next(index for index, line in enumerate(lines) if line.startswith("gradient norm"))
    decoder = record["models"][0]["mean"]["gradient_norm"]["decoder"]
    assert lines[table + 1].split()[-1] == f"{decoder[1] / decoder[0]:.3f}"


def test_numbers_are_those_of_an_independent_computation(first, small):
    """The same model and batch, with torch's own cross entropy of the logits and one norm a layer."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    result = first("--arch", POST, *COMMON, "--eval-mode")
    flags = options.parse_args_and_arch(options.get_training_parser(), [str(small), "--arch", POST, *COMMON])
    cfg = convert_namespace_to_omegaconf(flags)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    dataset = task.dataset("train")
    assert result["batch"] == {"sentences": 60, "target_tokens": sum(dataset.tgt_sizes)}  # all: there are no 3,000
    torch.manual_seed(1)
    model = task.build_model(cfg.model).eval()
    sample = dataset.collater([dataset[index] for index in range(60)])
    logits = model(**sample["net_input"])[0]
    words = sample["target"] != task.target_dictionary.pad()
    loss = torch.nn.functional.cross_entropy(logits[words], sample["target"][words])
    loss.backward()
    assert result["mean"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for side in ("encoder", "decoder"):
        layers = getattr(model, side).layers
        norms = [float(torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()) for layer in layers]
        assert result["mean"]["gradient_norm"][side] == pytest.approx(norms, rel=1e-4)


def test_the_mean_is_over_seeds_and_comes_again(first):
    words = ["--arch", POST, *COMMON, "--dropout", "0.2", "--seeds"]
    result = first(*words, 3)
    assert first(*words, 3) == result
    values = [seed["gradient_norm"]["encoder"][0] for seed in result["seeds"]]
    assert len(set(values)) == 3 and result["mean"]["gradient_norm"]["encoder"][0] == pytest.approx(sum(values) / 3)
    ratios = [seed["sublayers"]["decoder"][1]["beta_ln"] for seed in result["seeds"]]
    cross = result["mean"]["sublayers"]["decoder"][1]
    assert (cross["layer"], cross["part"]) == (1, "cross") and cross["beta_ln"] == pytest.approx(sum(ratios) / 3)
    assert first(*words, 1)["mean"]["loss"] == result["seeds"][0]["loss"]


def test_flags_of_fairseq_reach_all_models_and_a_model_has_its_own(measure):
    deeper = f"{POST} --decoder-layers 3 --deep-init ds"
    record, _ = measure("--arch", POST, "--arch", deeper, *COMMON, "--deep-init", "xavier")
    assert [model["name"] for model in record["models"]] == [POST, deeper]
    assert [len(model["mean"]["gradient_norm"]["decoder"]) for model in record["models"]] == [2, 3]
    alone, _ = measure("--arch", POST, *COMMON, "--decoder-layers", "3", "--deep-init", "ds")
    assert alone["models"][0]["mean"] == record["models"][1]["mean"]
    assert alone["options"]["fairseq_flags"][-4:] == ["--decoder-layers", "3", "--deep-init", "ds"]
    variance = [model["mean"]["sublayers"]["encoder"][2]["variance"] for model in record["models"]]
    assert abs(variance[0] - variance[1]) > 0.01


def test_what_runs_a_layer_twice_or_not_at_all_is_switched_off(first):
    flags = ["--encoder-layerdrop", "0.9", "--checkpoint-activations"]
    assert first("--arch", POST, *COMMON, *flags) == first("--arch", POST, *COMMON)


def test_a_trained_model_with_and_without_dropout(first, small, tmp_path):
    run(*train_command(small, tmp_path, "--max-update", "3", "--dropout", "0.3"))
    words = ["--path", tmp_path / "checkpoint_last.pt", "--cpu", "--seeds", "2"]
    one, other = first(*words)["seeds"]
    assert one["loss"] != other["loss"]
    result = first(*words, "--eval-mode")
    one, other = result["seeds"]
    assert {**one, "seed": 2} == other
    fresh = first("--arch", DLCL, *COMMON, "--eval-mode")
    assert abs(one["loss"] - fresh["mean"]["loss"]) > 0.01
    weights = compat.load_checkpoint(str(tmp_path / "checkpoint_last.pt"))["model"]
    distinct = {value.data_ptr(): value.numel() for key, value in weights.items()
                if not key.endswith(("version", "_float_tensor"))}  # fmt: skip
    assert result["parameters"] == fresh["parameters"] == sum(distinct.values())


def test_aggregators_and_models_without_residual_connections(measure, first):
    record, lines = measure("--arch", LSTM, *NARROW, "--cpu", "--per-layer")
    mean = record["models"][0]["mean"]
    assert mean["sublayers"] is None and set(mean["gradient_norm"]) == {
        "encoder", "decoder", "embedding", "encoder_aggregator", "decoder_aggregator"
    }  # fmt: skip
    assert any("no residual connections, so no Var(r) and beta" in line for line in lines)
    assert any(line.split()[:1] == ["aggregator"] for line in lines)
    prenorm = first("--arch", DLCL, *COMMON)["mean"]["sublayers"]["encoder"]
    assert {entry["beta_ln"] for entry in prenorm} == {None}, "no norm follows the sum"


def test_json_has_null_for_what_is_not_finite():
    value = {"a": [float("nan"), 1.5, float("inf")], "b": {"c": -float("inf"), "d": None, "e": 3, "f": "x"}}
    record = json.loads(diagnose._record(argparse.Namespace(plot=None), [value]))
    assert record["models"] == [{"a": [None, 1.5, None], "b": {"c": None, "d": None, "e": 3, "f": "x"}}]
    assert record["options"] == {"plot": None}


def test_memory_that_is_not_there_is_one_line(small, monkeypatch, command):
    def too_much(*args):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(measuring, "_measure_once", too_much)
    code, out, error = command("diagnose", small, "--arch", POST, *COMMON)
    assert (code, out, error.count("\n")) == (2, "", 1) and "does not fit into memory: use fewer --tokens" in error
