"""fairseq-deep plot weights: the numbers, the masking rule of the paper's Fig. 5, the picture."""

import argparse
import csv
import json
import os
import sys

import pytest
import torch

from fairseq_deep.cli import main
from fairseq_deep.core.diagnostics.weights import WeightMatrix
from fairseq_deep.tools import pictures, plot
from tests.helpers.tools import failing

fails = failing("plot", "weights")

ENCODER = torch.tensor([[1.0, 9, 9], [-0.5, 0.09, 9], [0.3, -4.0, 0.1]])
DECODER = torch.tensor([[2.0, 9], [0.0, 1.5]])


def checkpoint(path, encoder=ENCODER, decoder=DECODER, **flags):
    model = {"encoder.layers.0.fc1.weight": torch.zeros(2, 2)}
    model.update({f"{side}.history.weight": weight for side, weight in (("encoder", encoder), ("decoder", decoder))
                  if weight is not None})  # fmt: skip
    torch.save({"args": None, "cfg": {"model": argparse.Namespace(**flags)}, "model": model}, path)
    return str(path)


def draw(*arguments):
    return main(["plot", "weights", *map(str, arguments)])




def test_points_below_a_tenth_or_5_percent_of_their_row_are_left_out():
    values = torch.tensor([[0.1, 0.0, 0.0], [0.0999, -0.2, 0.0], [-0.5, 0.49, 10.0]])
    shown = WeightMatrix(values, 1).significant()
    assert shown.tolist() == [[True, False, False], [False, True, False], [True, False, True]]


def test_json_and_csv_hold_the_lower_triangle_at_full_precision(tmp_path, capsys):
    path = checkpoint(tmp_path / "a.pt")
    assert draw(path, "--json", tmp_path / "w.json", "--csv", tmp_path / "w.csv") == 0
    record = json.loads((tmp_path / "w.json").read_text())
    expected = [row[: index + 1] for index, row in enumerate(ENCODER.tolist())]
    assert record["encoder"]["weights"] == expected and record["encoder"]["weights_per_entry"] == 1
    # 0.09 is below 0.1; 0.1 (as fp32) is below 5 % of 4
    assert record["encoder"]["shown"] == [[True], [True, False], [True, True, False]]
    with open(tmp_path / "w.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 + 3
    for row in rows:
        side = record[row["stack"]]
        assert float(row["weight"]) == side["weights"][int(row["row"])][int(row["column"])]
        assert bool(int(row["shown"])) == side["shown"][int(row["row"])][int(row["column"])]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "w.csv", "w.json"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "encoder 3x3 1 4 of 6 0.397 2.250 0.300 0.600 4.000".split()
    assert lines[2].split() == "decoder 2x2 1 2 of 3 1.750 0.000 - 1.000 2.000".split()
    assert lines[-1] == f"-> {tmp_path}/w.json, {tmp_path}/w.csv"


@pytest.mark.parametrize("kind", pictures.FORMATS)
def test_picture_is_written_and_the_same_again(tmp_path, kind):
    pytest.importorskip("matplotlib")
    path = checkpoint(tmp_path / "a.pt")
    contents = []
    for name in ("1", "2"):
        assert draw(path, "--output", tmp_path / f"{name}.{kind}") == 0
        contents.append((tmp_path / f"{name}.{kind}").read_bytes())
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert contents[0] == contents[1] and contents[0].startswith(start)


def test_panels_are_encoder_decoder_and_one_column(tmp_path):
    pytest.importorskip("matplotlib")
    weights = torch.arange(31.0).repeat(31, 1).tril() / 10
    path = checkpoint(tmp_path / "a.pt", encoder=weights)
    figure = pictures.draw_weights(plot.load_weights(path), 10)
    panels = [axes for axes in figure.axes if axes.get_title()]
    titles = ["(a) 30-layer encoder", "(b) 1-layer decoder", "(c) weights of $y_{10}$ in the encoder"]
    assert [axes.get_title() for axes in panels] == titles
    image = panels[0].images[1].get_array()
    assert image.shape == (31, 31) and image.mask[0, 0] and not image.mask[30, 2:].any() and image.mask[5, 6:].all()
    line = panels[2].lines[1]
    assert list(line.get_xdata()) == list(range(11, 32)) and list(line.get_ydata()) == [1.0] * 21


def test_column_is_a_third_of_the_depth_unless_it_is_given(tmp_path):
    pytest.importorskip("matplotlib")
    path = checkpoint(tmp_path / "a.pt", encoder=torch.eye(31))
    pictures = {}
    for arguments, column in (((), 10), (("--column", "29"), 29)):
        assert draw(path, "--output", tmp_path / "w.svg", *arguments) == 0
        pictures[column] = (tmp_path / "w.svg").read_text()
        assert draw(path, "--output", tmp_path / "same.svg", "--column", column) == 0
        assert (tmp_path / "same.svg").read_text() == pictures[column]
    assert pictures[10] != pictures[29]


def test_picture_has_a_name_of_its_own_without_any_output(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "run").mkdir()
    path = checkpoint(tmp_path / "run" / "checkpoint_best.pt")
    monkeypatch.chdir(tmp_path)
    assert draw(path) == 0
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_best.weights.png", "run"]
    assert capsys.readouterr().out.splitlines()[-1] == "-> checkpoint_best.weights.png"
    picture = (tmp_path / "checkpoint_best.weights.png").read_bytes()
    (tmp_path / "run2").mkdir()
    other = checkpoint(tmp_path / "run2" / "checkpoint_best.pt")
    assert draw(other) == 2 and "exists; add --output" in capsys.readouterr().err
    assert (tmp_path / "checkpoint_best.weights.png").read_bytes() == picture
    assert draw(other, "--output", "run2.svg") == 0 and "run2/checkpoint_best.pt" in (tmp_path / "run2.svg").read_text()


def test_several_weights_an_entry_are_averaged_and_said_so(tmp_path):
    pytest.importorskip("matplotlib")
    vector = torch.stack([ENCODER, ENCODER + 2.0, ENCODER - 0.5], dim=2)
    matrices = plot.load_weights(checkpoint(tmp_path / "a.pt", encoder=vector))
    torch.testing.assert_close(matrices["encoder"].values.tril(), (ENCODER + 0.5).tril())
    titles = [axes.get_title() for axes in pictures.draw_weights(matrices, 1).axes]
    note = "\nmean over the 3 weights of an entry"
    assert titles[:2] == [f"(a) 2-layer encoder{note}", "(b) 1-layer decoder"] and titles[2].endswith(note)


@pytest.mark.parametrize(
    ("flags", "last_row"),
    [
        ({"dlcl_window": 2}, [0.0, -4.0, 0.1]),
        ({"dlcl_normalize": True}, torch.softmax(ENCODER[2], 0).tolist()),
        ({"dlcl_normalize": True, "dlcl_window": 2}, [0.0, *torch.softmax(ENCODER[2, 1:], 0).tolist()]),
        # the original code: its window masked nothing but start values, unless the weights were normalised
        ({"history_window_size": 2}, ENCODER[2].tolist()),
        ({"history_window_size": -1, "normalize_learned_weight": True}, torch.softmax(ENCODER[2], 0).tolist()),
        (
            {"history_window_size": 2, "normalize_learned_weight": True},
            [0.0, *torch.softmax(ENCODER[2, 1:], 0).tolist()],
        ),
    ],
    ids=str,
)
def test_window_and_softmax_come_from_the_checkpoint(tmp_path, flags, last_row):
    matrices = plot.load_weights(checkpoint(tmp_path / "a.pt", **flags))
    torch.testing.assert_close(matrices["encoder"].values[2], torch.tensor(last_row))


def test_original_code_and_one_stack(tmp_path, capsys):
    path = checkpoint(tmp_path / "a.pt", encoder=None, decoder=DECODER.unsqueeze(-1))
    assert draw(path, "--csv", tmp_path / "w.csv") == 0
    assert (tmp_path / "w.csv").read_text().splitlines()[1:] == ["decoder,0,0,2.0,1", "decoder,1,0,0.0,0",
                                                                 "decoder,1,1,1.5,1"]  # fmt: skip
    pytest.importorskip("matplotlib")
    assert draw(path, "--output", tmp_path / "w.svg") == 0


def test_missing_matplotlib_names_its_cure_and_is_needed_for_pictures_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = checkpoint(tmp_path / "a.pt")
    assert "pip install matplotlib" in fails(capsys, path, "--output", tmp_path / "w.png")
    assert draw(path, "--csv", tmp_path / "w.csv") == 0
