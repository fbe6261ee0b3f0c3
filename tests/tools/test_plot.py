"""fairseq-deep plot: the weights of DLCL by the rule of the paper's Fig. 5, and the curves of logs."""

import argparse
import csv
import json
import math
import os
import sys

import pytest
import torch

from fairseq_deep.tools import pictures, plot, training_logs
from tests.helpers import exports
from tests.helpers.commands import run, train_command
from tests.helpers.runs import LOGS, make_run

ENCODER = torch.tensor([[1.0, 9, 9], [-0.5, 0.09, 9], [0.3, -4.0, 0.1]])
DECODER = torch.tensor([[2.0, 9], [0.0, 1.5]])


def checkpoint(path, encoder=ENCODER, decoder=DECODER, **flags):
    model = {"encoder.layers.0.fc1.weight": torch.zeros(2, 2)}
    model.update({f"{side}.history.weight": weight for side, weight in (("encoder", encoder), ("decoder", decoder))
                  if weight is not None})  # fmt: skip
    return exports.checkpoint(path, model, cfg={"model": argparse.Namespace(**flags)})


@pytest.fixture
def draw(command):
    """draw("weights" or "run", WORD, ...): the lines that the command prints."""

    def draw(*words):
        code, out, errors = command("plot", *words)
        assert (code, errors) == (0, "")
        return out.splitlines()

    return draw


@pytest.fixture
def here(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_and_csv_hold_the_lower_triangle_at_full_precision(tmp_path, draw, monkeypatch):
    """Without matplotlib."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    path = checkpoint(tmp_path / "a.pt")
    lines = draw("weights", path, "--json", tmp_path / "w.json", "--csv", tmp_path / "w.csv")
    record = json.loads((tmp_path / "w.json").read_text())
    expected = [row[: index + 1] for index, row in enumerate(ENCODER.tolist())]
    assert record["encoder"]["weights"] == expected and record["encoder"]["weights_per_entry"] == 1
    # 0.09 is below 0.1; 0.1 (as fp32) is below 5 % of 4
    assert record["encoder"]["shown"] == [[True], [True, False], [True, True, False]]
    with open(tmp_path / "w.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 + 3
    for row in rows:
        side, line, column = record[row["stack"]], int(row["row"]), int(row["column"])
        found = float(row["weight"]), row["shown"] == "1"
        assert found == (side["weights"][line][column], side["shown"][line][column])
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "w.csv", "w.json"]
    assert lines[1].split() == "encoder 3x3 1 4 of 6 0.397 2.250 0.300 0.600 4.000".split()
    assert lines[2].split() == "decoder 2x2 1 2 of 3 1.750 0.000 - 1.000 2.000".split()
    assert lines[-1] == f"-> {tmp_path}/w.json, {tmp_path}/w.csv"


@pytest.mark.parametrize("kind, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_is_the_same_again(here, draw, kind, start):
    """Its column is a third of the depth unless it is given."""
    checkpoint("a.pt", encoder=torch.eye(31))
    for name, words in {"1": (), "2": ("--column", "10")}.items():
        draw("weights", "a.pt", "--output", f"{name}.{kind}", *words)
    first, second = ((here / f"{name}.{kind}").read_bytes() for name in ("1", "2"))
    assert first == second and first.startswith(start)


def test_panels_are_encoder_decoder_and_one_column(here):
    weights = torch.arange(31.0).repeat(31, 1).tril() / 10
    decoder = torch.stack([DECODER, DECODER + 2.0], dim=2)  # two weights an entry
    figure = pictures.draw_weights(plot.load_weights(checkpoint("a.pt", weights, decoder)), 10)
    panels = [axes for axes in figure.axes if axes.get_title()]
    titles = ["(a) 30-layer encoder", "(b) 1-layer decoder\nmean over the 2 weights of an entry",
              "(c) weights of $y_{10}$ in the encoder"]  # fmt: skip
    assert [axes.get_title() for axes in panels] == titles
    image = panels[0].images[1].get_array()
    assert image.shape == (31, 31) and image.mask[0, 0] and not image.mask[30, 2:].any() and image.mask[5, 6:].all()
    line = panels[2].lines[1]
    assert list(line.get_xdata()) == list(range(11, 32)) and list(line.get_ydata()) == [1.0] * 21


WITHIN_TWO = [0.0, *torch.softmax(ENCODER[2, 1:], 0).tolist()]


@pytest.mark.parametrize("flags, last_row", [
    ({"dlcl_window": 2}, [0.0, -4.0, 0.1]),
    ({"dlcl_normalize": True}, torch.softmax(ENCODER[2], 0).tolist()),
    ({"dlcl_normalize": True, "dlcl_window": 2}, WITHIN_TWO),
    # the original code: its window masked nothing but start values, unless the weights were normalised
    ({"history_window_size": 2}, ENCODER[2].tolist()),
    ({"history_window_size": 2, "normalize_learned_weight": True}, WITHIN_TWO),
], ids=str)  # fmt: skip
def test_window_and_softmax_come_from_the_checkpoint(tmp_path, flags, last_row):
    matrices = plot.load_weights(checkpoint(tmp_path / "a.pt", **flags))
    torch.testing.assert_close(matrices["encoder"].values[2], torch.tensor(last_row))


WANTED = {  # of `LOGS`
    "loss": {10: 9.5, 20: 8.25}, "ppl": {10: 724.1, 20: 304.4}, "lr": {10: 0.001, 20: 0.002},
    "gnorm": {10: 2.5, 20: 1.5}, "valid_loss": {20: 8.5}, "valid_ppl": {20: 362.0},
}  # fmt: skip


def write_log(path):
    """`LOGS` as fairseq prints them."""
    lines = [f"2026-11-22 09:28:14 | INFO | {entry['kind']} | {json.dumps(entry)}" for entry in LOGS]
    path.write_text("\n".join(["2026-11-22 | INFO | fairseq.trainer | begin training epoch 1", *lines]) + "\n")
    return path


@pytest.mark.parametrize("form", ["json", "simple", "tqdm"])
def test_what_fairseq_prints(form, small, tmp_path):
    words = train_command(small, tmp_path / "save", "--max-update", "4", "--no-save")
    words[words.index("--log-format") + 1] = form
    (tmp_path / "log").write_text(run(*words).stdout)
    found = training_logs.read_run(str(tmp_path / "log"))
    assert list(found["loss"]) == [1, 2, 3, 4] and max(found["valid_loss"]) == 4
    assert found["lr"][2] == pytest.approx(1e-3) and min(found["gnorm"].values()) > 0


def test_a_resumed_run_is_one_curve(tmp_path):
    path = write_log(tmp_path / "a.log")
    again = {"num_updates": "20", "loss": "8.125"}
    path.write_text(path.read_text() + f"x | INFO | train_inner | {json.dumps(again)}\n")
    assert training_logs.read_run(str(path))["loss"] == {10: 9.5, 20: 8.125}


def test_table_numbers_and_picture(here, draw):
    make_run(here / "exp/one")
    write_log(here / "exp/two.log")
    table = [line.split() for line in draw("run", "exp/one", "exp/two.log", "--output", "r.svg", "--csv", "r.csv")]
    assert table[1] == ["one", "20", "8.250", "8.500", "8.500", "362.000", "362.000"]
    assert table[2][0] == "two.log" and table[2][1:] == table[1][1:]
    lines = (here / "r.csv").read_bytes().decode().split("\n")[:-1]
    assert lines[:2] == ["run,measure,update,value", "one,loss,10,9.5"] and len(lines) == 1 + 2 * 10
    assert (here / "r.svg").read_text().count("two.log") == 1


def test_the_picture_shows_the_numbers(here):
    runs = {"a": training_logs.read_run(str(write_log(here / "a.log"))), "b": {"loss": {1: 3.0, 2: math.nan}}}
    figure = pictures.draw_runs(runs)
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "perplexity", "learning rate", "gradient norm"]
    drawn = [dict(zip(*map(list, line.get_data()))) for line in panels["loss"].lines]
    assert drawn[:2] == [WANTED["loss"], WANTED["valid_loss"]] and list(drawn[2]) == [1, 2]
    assert panels["perplexity"].get_yscale() == panels["gradient norm"].get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert figure.legends[0].get_title().get_text() == "thin: training, thick: validation"
    assert len(pictures.draw_runs({"b": runs["b"]}).axes) == 1


def test_bleu_of_validation_is_shown(here, draw):
    lines = [f"2026-01-01 | INFO | valid | epoch 1 | valid on 'valid' subset | loss 5 | ppl 32 | bleu {bleu} | "
             f"num_updates {update}" for update, bleu in ((10, 2.5), (20, 9.1), (30, 7))]  # fmt: skip
    (here / "a.log").write_text("\n".join(lines) + "\n")
    assert draw("run", "a.log")[1].split()[-2:] == ["7.000", "9.100"]
    draw("run", "a.log", "--output", "b.svg")
    assert ">BLEU<" in (here / "b.svg").read_text()
