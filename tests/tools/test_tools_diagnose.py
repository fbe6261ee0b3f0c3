"""fairseq-deep diagnose: what is measured, on what, and how it is told."""

import json
import os
import random
import sys

import pytest
import torch

from fairseq_deep.tools import diagnose, measuring
from fairseq_deep.tools.main import main
from tests.helpers.commands import FEED_FORWARD, NARROW, binarise, run, train_command, write_pairs
from tests.helpers.methods import DLCL
from tests.helpers.models import POSTNORM as POST
from tests.helpers.tools import failing

fails = failing("diagnose")

LSTM = "transformer_lstm_2l2l_tiny"
COMMON = [*NARROW, *FEED_FORWARD, "--cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(11)
    for split, count in (("train", 60), ("valid", 8)):
        write_pairs(folder / split, count, rng)
    return binarise(folder, ("train", "valid"))


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(*train_command(data, folder, "--max-update", "3", "--dropout", "0.3"))
    return folder / "checkpoint_last.pt"


def measure(tmp_path, *arguments):
    """Run the command in this process; return what it writes as JSON."""
    path = tmp_path / "out.json"
    assert main(["diagnose", *map(str, arguments), "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_real_command_line(data, tmp_path):
    done = run("fairseq-deep", "diagnose", data, "--arch", POST, "--arch", DLCL, *COMMON,
               "--tokens", "100", "--seeds", "2", "--json", tmp_path / "a.json", cwd=tmp_path)  # fmt: skip
    assert "dictionary" not in done.stderr and "Warning" not in done.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    batch = record["models"][0]["batch"]
    first = f"{batch['sentences']} sentences of train, {batch['target_tokens']} target tokens; train mode; 2 seeds"
    lines = done.stdout.splitlines()
    assert lines[0] == first and 100 <= batch["target_tokens"] < 110  # sentences have at most 9 tokens
    assert record["command"][1:5] == ["diagnose", str(data), "--arch", POST]
    assert set(record["versions"]) == {"fairseq_deep", "fairseq", "torch", "python"}
    position = [index for index, line in enumerate(lines) if line.startswith("  2  ")][1]
    measured = record["models"][1]["mean"]  # pre-norm: its streams differ from layer to layer
    numbers = [values[side][layer] for side in ("encoder", "decoder")
               for values, layer in ((measured["gradient_norm"], 1), (measured["stream_std"], 2),
                                     (measured["stream_between"], 2))]  # fmt: skip
    assert lines[position].split() == ["2", *map(diagnose._number, numbers)]
    for model, name in zip(record["models"], (POST, DLCL)):
        mean = model["mean"]
        head = f"{name}: {model['parameters']:,} parameters, loss {mean['loss']:.3f}"
        assert f"{head}, source gain {mean['source_gain']:.3f}" in lines
        assert model["name"] == name and [entry["seed"] for entry in model["seeds"]] == [1, 2]
        norms = model["mean"]["gradient_norm"]
        row = next(line.split() for line in lines[lines.index("", lines.index(first)) :] if line.startswith(name))
        assert row[0].rstrip(":") == name
        assert len(norms["encoder"]) == len(norms["decoder"]) == 2 and min(norms["encoder"] + norms["decoder"]) > 0
    table = next(index for index, line in enumerate(lines) if line.startswith("gradient norm"))
    decoder = record["models"][0]["mean"]["gradient_norm"]["decoder"]
    assert lines[table + 1].split()[-1] == f"{decoder[1] / decoder[0]:.3f}"


def test_numbers_are_those_of_an_independent_computation(data, tmp_path):
    """The same model and batch, with torch's own cross entropy of the logits and one norm a layer."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    result = measure(tmp_path, data, "--arch", POST, *COMMON, "--eval-mode")["models"][0]
    flags = options.parse_args_and_arch(options.get_training_parser(), [str(data), "--arch", POST, *COMMON])
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
        norms = [
            float(torch.cat([p.grad.flatten() for p in layer.parameters()]).norm())
            for layer in getattr(model, side).layers
        ]
        assert result["mean"]["gradient_norm"][side] == pytest.approx(norms, rel=1e-4)


def test_mean_over_seeds_and_the_same_again(data, tmp_path):
    arguments = [data, "--arch", POST, *COMMON, "--seeds", "3", "--dropout", "0.2"]
    result = measure(tmp_path, *arguments)["models"][0]
    assert measure(tmp_path, *arguments)["models"][0] == result
    values = [seed["gradient_norm"]["encoder"][0] for seed in result["seeds"]]
    assert len(set(values)) == 3 and result["mean"]["gradient_norm"]["encoder"][0] == pytest.approx(sum(values) / 3)
    ratios = [seed["sublayers"]["decoder"][1]["beta_ln"] for seed in result["seeds"]]
    cross = result["mean"]["sublayers"]["decoder"][1]
    assert (cross["layer"], cross["part"]) == (1, "cross") and cross["beta_ln"] == pytest.approx(sum(ratios) / 3)
    one = measure(tmp_path, *arguments[:-4], "--dropout", "0.2", "--seeds", "1")["models"][0]
    assert one["mean"]["loss"] == result["seeds"][0]["loss"]


def test_flags_of_fairseq_reach_the_fresh_models(data, tmp_path):
    plain = measure(tmp_path, data, "--arch", POST, *COMMON)
    deeper = measure(tmp_path, data, "--arch", POST, *COMMON, "--encoder-layers", "3", "--deep-init", "ds")
    assert len(deeper["models"][0]["mean"]["gradient_norm"]["encoder"]) == 3
    assert len(plain["models"][0]["mean"]["gradient_norm"]["encoder"]) == 2
    assert deeper["options"]["fairseq_flags"][-4:] == ["--encoder-layers", "3", "--deep-init", "ds"]
    variance = [record["models"][0]["mean"]["sublayers"]["encoder"][2]["variance"] for record in (plain, deeper)]
    assert abs(variance[0] - variance[1]) > 0.01


def test_flags_of_one_model_alone(data, tmp_path):
    deeper = f"{POST} --decoder-layers 3 --deep-init ds"
    record = measure(tmp_path, data, "--arch", POST, "--arch", deeper, *COMMON, "--deep-init", "xavier")
    assert [model["name"] for model in record["models"]] == [POST, deeper]
    assert [len(model["mean"]["gradient_norm"]["decoder"]) for model in record["models"]] == [2, 3]
    alone = measure(tmp_path, data, "--arch", POST, *COMMON, "--decoder-layers", "3", "--deep-init", "ds")
    assert alone["models"][0]["mean"] == record["models"][1]["mean"]


def test_what_runs_a_layer_twice_or_not_at_all_is_switched_off(data, tmp_path):
    plain = measure(tmp_path, data, "--arch", POST, *COMMON)["models"]
    flags = ["--encoder-layerdrop", "0.9", "--checkpoint-activations"]
    assert measure(tmp_path, data, "--arch", POST, *COMMON, *flags)["models"] == plain


def test_split_and_number_of_tokens(data, tmp_path):
    record = measure(tmp_path, data, "--arch", POST, *COMMON, "--split", "valid", "--tokens", "1")
    assert record["models"][0]["batch"]["sentences"] == 1
    record = measure(tmp_path, data, "--arch", POST, *COMMON, "--split", "valid")
    assert record["models"][0]["batch"]["sentences"] == 8


def test_batch_is_from_the_middle_with_little_padding(data):
    task = measuring.fresh(POST, str(data), COMMON).task
    sample = measuring._batch(task, "train", 100)
    sizes = sorted(task.dataset("train").src_sizes)
    lengths = sample["net_input"]["src_lengths"]
    assert 100 <= sample["ntokens"] < 110 and int(lengths.max() - lengths.min()) <= 2
    assert sizes[0] < int(lengths.min()) and int(lengths.max()) < sizes[-1]
    assert measuring._batch(task, "train", 100)["id"].tolist() == sample["id"].tolist()
    everything = measuring._batch(task, "train", 10000)
    assert sorted(everything["id"].tolist()) == list(range(60))


def test_trained_model_with_and_without_dropout(data, checkpoint, tmp_path, capsys):
    from fairseq_deep.plugin import compat

    arguments = [data, "--path", checkpoint, "--cpu", "--seeds", "2"]
    first, second = measure(tmp_path, *arguments)["models"][0]["seeds"]
    assert first["loss"] != second["loss"]
    first, second = measure(tmp_path, *arguments, "--eval-mode")["models"][0]["seeds"]
    assert {**first, "seed": 2} == second
    fresh = measure(tmp_path, data, "--arch", DLCL, *COMMON, "--eval-mode")["models"][0]
    assert abs(first["loss"] - fresh["mean"]["loss"]) > 0.01
    weights = sum(w.numel() for key, w in compat.load_checkpoint(str(checkpoint))["model"].items()
                  if "embed_tokens" not in key and "version" not in key and "_float" not in key
                  and "output_projection" not in key)  # fmt: skip
    table = 14 * 16  # ten digits and four symbols, maybe padded to a multiple of 8 by fairseq-preprocess
    assert fresh["parameters"] - weights in (table, 16 * 16)


def test_aggregators_and_models_without_residual_connections(data, tmp_path, capsys):
    record = measure(tmp_path, data, "--arch", LSTM, *NARROW, "--cpu", "--per-layer")
    mean = record["models"][0]["mean"]
    assert mean["sublayers"] is None and set(mean["gradient_norm"]) == {
        "encoder", "decoder", "embedding", "encoder_aggregator", "decoder_aggregator"
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "no residual connections, so no Var(r) and beta" in printed
    assert any(line.split()[:1] == ["aggregator"] for line in printed.splitlines())


def test_per_layer_ratios_and_their_means(data, tmp_path, capsys):
    record = measure(tmp_path, data, "--arch", POST, *COMMON)
    means = [line.split() for line in capsys.readouterr().out.splitlines() if " mean " in line]
    assert [row[:2] for row in means] == [["encoder", "self"], ["encoder", "ffn"], ["decoder", "self"],
                                          ["decoder", "cross"], ["decoder", "ffn"]]  # fmt: skip
    entries = record["models"][0]["mean"]["sublayers"]["decoder"]
    assert [(entry["layer"], entry["part"]) for entry in entries] == [
        (layer, part) for layer in (1, 2) for part in ("self", "cross", "ffn")
    ]
    for column, name in enumerate(("variance", "beta_ln", "beta_rc", "beta"), 3):
        cross = [entry[name] for entry in entries if entry["part"] == "cross"]
        assert float(means[3][column]) == pytest.approx(sum(cross) / 2, abs=6e-4)
    measure(tmp_path, data, "--arch", POST, *COMMON, "--per-layer")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(row[:2] == ["decoder", "cross"] for row in rows) == 3
    # pre-norm: no norm follows the sum
    record = measure(tmp_path, data, "--arch", DLCL, *COMMON)
    assert {entry["beta_ln"] for entry in record["models"][0]["mean"]["sublayers"]["encoder"]} == {None}


def test_figure_has_a_panel_a_stack_and_a_line_a_model(data, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.svg"
    assert main(["diagnose", str(data), "--arch", POST, "--arch", DLCL, *COMMON, "--plot", str(path)]) == 0
    text = path.read_text()
    words = (POST, DLCL, "encoder", "decoder", "gradient norm")
    assert text.startswith("<?xml") and all(word in text for word in words)

    def result(name, encoder, decoder):
        return {"name": name, "mean": {"gradient_norm": {"encoder": encoder, "decoder": decoder}}}

    figure = diagnose._draw([result("a", [1.0, 2.0], [1e-3, 1.0]), result("b", [1.0, 3.0, 2.0], [1.0, 1.0])])
    encoder, decoder = figure.axes
    assert (encoder.get_yscale(), decoder.get_yscale()) == ("linear", "log")
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in encoder.lines]
    assert lines == [("a", [1, 2], [1.0, 2.0]), ("b", [1, 2, 3], [1.0, 3.0, 2.0])]


def test_json_has_null_for_what_is_not_finite():
    value = {"a": [float("nan"), 1.5, float("inf")], "b": {"c": -float("inf"), "d": None, "e": 3, "f": "x"}}
    assert diagnose._finite(value) == {"a": [None, 1.5, None], "b": {"c": None, "d": None, "e": 3, "f": "x"}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to measure: give --arch NAME or --path CHECKPOINT"),
        (["--arch", "transformer_dlcl_31l"], "not an architecture of this package (did you mean transformer_dlcl_3"),
        (["--arch", "transformer_wmt_en_de"], "transformer_wmt_en_de is not an architecture of this package"),
        (["--arch", POST, "--encoder-layer", "3"], "--encoder-layer"),
        (["--arch", f"{POST} 'open"], "wrong flags in"),
        (["--arch", ""], "is not an architecture of this package"),
        (["--arch", POST, "--encoder-layers", "three"], "invalid int value: 'three'"),
        (["--arch", POST, "--deep-init", "xaver"], "unknown --deep-init xaver (did you mean xavier?)"),
        (["--arch", POST, "--encoder-embed-dim", "15"], "is not divisible by"),
        (["--arch", POST, "--split", "test"], "cannot read the split test"),
        (["--arch", POST, "--source-lang", "xx", "--target-lang", "tgt"], "dict.xx.txt"),
        (["--path", "nowhere.pt"], "nowhere.pt: no such checkpoint"),
        (["--path", "nowhere.pt", "--encoder-layers", "3"], "--encoder-layers is not supported with --path"),
        (["--arch", POST, "--plot", "a.jpg"], "the file name must end in .png, .svg, .pdf"),
        (["--arch", POST, "--json", "no/a.json"], "the directory no does not exist"),
    ],
    ids=lambda value: " ".join(value[2:] or value[:1]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(data, tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert problem in fails(capsys, data, *arguments)
    assert os.listdir(tmp_path) == []


def test_wrong_data_and_wrong_checkpoints(data, checkpoint, tmp_path, capsys):
    assert "3: no such directory; give a directory" in fails(capsys, "--encoder-layers", "3", data, "--arch", POST)
    (tmp_path / "empty").mkdir()
    assert f"cannot read {tmp_path}/empty" in fails(capsys, tmp_path / "empty", "--arch", POST)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert f"cannot load {tmp_path}/text.pt" in fails(capsys, data, "--path", tmp_path / "text.pt")
    for pair in ("train.src", "train.tgt"):
        (tmp_path / pair).write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z\n" * 5)
    other = binarise(tmp_path, ("train",))
    assert "trained with another source dictionary" in fails(capsys, other, "--path", checkpoint)


def test_memory_that_is_not_there_is_one_line(data, monkeypatch, capsys):
    def too_much(*args):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(measuring, "_measure_once", too_much)
    assert "does not fit into memory: use fewer --tokens" in fails(capsys, data, "--arch", POST, *COMMON)


def test_missing_matplotlib_is_told_before_anything_is_measured(data, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(measuring, "_batch", lambda *args: pytest.fail("measured"))
    assert "pip install matplotlib" in fails(capsys, data, "--arch", POST, *COMMON, "--plot", tmp_path / "a.png")
