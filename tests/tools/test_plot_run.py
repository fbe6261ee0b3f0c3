"""``fairseq-deep plot run``: what a log says of a training, in a table, a picture and a file of numbers."""

import json
import math

import pytest

from fairseq_deep.cli import main
from fairseq_deep.tools import pictures, training_logs
from tests.helpers.commands import run, train_command

INNER = [(10, "9.5", "724.1", "0.001", "2.5"), (20, "8.25", "304.4", "0.002", "1.5")]
VALID = [(20, "8.5", "362")]
WANTED = {
    "loss": {10: 9.5, 20: 8.25},
    "ppl": {10: 724.1, 20: 304.4},
    "lr": {10: 0.001, 20: 0.002},
    "gnorm": {10: 2.5, 20: 1.5},
    "valid_loss": {20: 8.5},
    "valid_ppl": {20: 362.0},
}
NAMES = ("num_updates", "loss", "ppl", "lr", "gnorm")
VALID_NAMES = ("valid_num_updates", "valid_loss", "valid_ppl")


def entries():
    for names, rows, kind in ((NAMES, INNER, "train_inner"), (VALID_NAMES, VALID, "valid")):
        for row in rows:
            yield kind, {"epoch": 1, **{name: str(value) for name, value in zip(names, row)}}


def write_json(path):
    lines = [f"2026-11-22 09:28:14 | INFO | {kind} | {json.dumps(entry)}" for kind, entry in entries()]
    path.write_text("\n".join(["2026-11-22 | INFO | fairseq.trainer | begin training epoch 1", *lines]) + "\n")
    return path


def write_jsonl(path):
    path.write_text("".join(json.dumps({"kind": kind, "time": 1.5, **entry}) + "\n" for kind, entry in entries()))
    return path


def curves_of(path):
    return {name: curve for name, curve in training_logs.read_run(str(path)).items() if name in WANTED}


def plot(*words):
    return main(["plot", "run", *map(str, words)])


def test_the_numbers_of_each_form_of_log(tmp_path):
    assert curves_of(write_json(tmp_path / "a.log")) == WANTED
    assert curves_of(write_jsonl(tmp_path / "a.jsonl")) == WANTED


@pytest.mark.parametrize("form", ["json", "simple", "tqdm"])
def test_what_fairseq_prints(form, small, tmp_path):
    command = train_command(small, tmp_path / "save", "--max-update", "4", "--no-save")
    command[command.index("--log-format") + 1] = form
    (tmp_path / "log").write_text(run(*command).stdout)
    found = training_logs.read_run(str(tmp_path / "log"))
    assert list(found["loss"]) == [1, 2, 3, 4] and max(found["valid_loss"]) == 4
    assert found["lr"][2] == pytest.approx(1e-3) and min(found["gnorm"].values()) > 0


def test_a_training_that_went_on_is_one_curve(tmp_path):
    path = write_json(tmp_path / "a.log")
    again = {"num_updates": "20", "loss": "8.125"}
    path.write_text(path.read_text() + f"x | INFO | train_inner | {json.dumps(again)}\n")
    assert curves_of(path)["loss"] == {10: 9.5, 20: 8.125}


def test_table_numbers_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "exp/one"
    folder.mkdir(parents=True)
    write_jsonl(folder / "train.jsonl")
    other = write_json(tmp_path / "exp/two.log")
    picture, numbers = tmp_path / "run.svg", tmp_path / "run.csv"
    assert plot(folder, other, "--output", picture, "--csv", numbers) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1] == ["one", "20", "8.250", "8.500", "8.500", "362.000", "362.000"]
    assert table[2][0] == "two.log" and table[2][1:] == table[1][1:]
    lines = numbers.read_text().splitlines()
    assert lines[:2] == ["run,measure,update,value", "one,loss,10,9.5"] and len(lines) == 1 + 2 * 10
    assert picture.read_text().count("two.log") == 1


def test_the_picture_shows_the_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {"a": training_logs.read_run(str(write_json(tmp_path / "a.log"))), "b": {"loss": {1: 3.0, 2: math.nan}}}
    figure = pictures.draw_runs(runs)
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "perplexity", "learning rate", "gradient norm"]
    drawn = [dict(zip(*map(list, line.get_data()))) for line in panels["loss"].lines]
    assert drawn[:2] == [WANTED["loss"], WANTED["valid_loss"]] and list(drawn[2]) == [1, 2]
    assert panels["perplexity"].get_yscale() == panels["gradient norm"].get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert figure.legends[0].get_title().get_text() == "thin: training, thick: validation"
    assert len(pictures.draw_runs({"b": runs["b"]}).axes) == 1


@pytest.mark.filterwarnings("error")
def test_a_run_whose_figures_are_no_numbers_is_drawn_without_a_warning(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = tmp_path / "a.log"
    log.write_text('{"kind": "train_inner", "num_updates": "5", "loss": "nan", "ppl": "nan", "gnorm": "0"}\n')
    assert main(["plot", "run", str(log), "--output", str(tmp_path / "a.svg")]) == 0
    assert "nan" in capsys.readouterr().out and (tmp_path / "a.svg").stat().st_size > 1000


def test_bleu_of_validation_is_shown_and_a_default_picture_is_not_replaced(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    lines = [f"2026-01-01 | INFO | valid | epoch 1 | valid on 'valid' subset | loss 5 | ppl 32 | bleu {bleu} | "
             f"num_updates {update}" for update, bleu in ((10, 2.5), (20, 9.1), (30, 7))]  # fmt: skip
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    assert plot("a.log") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["7.000", "9.100"]
    assert plot("a.log") == 2 and "run.png: exists; add --output" in capsys.readouterr().err
    assert plot("a.log", "--output", "b.svg") == 0 and ">BLEU<" in (tmp_path / "b.svg").read_text()
