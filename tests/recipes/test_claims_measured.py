"""``examples/claims``: times, fit, and the commands that a claim starts."""

import os
import signal
import subprocess
import types

import pytest

from fairseq_deep.tools import UsageError, flags_of


def test_times_are_read_from_what_fairseq_prints(claims):
    """Its lines at the end of a translation and in a training's json log."""
    line = "NOTE | Translated 1,000 sentences (9,459 tokens) in 11.0s (90.96 sentences/s, 860.40 tokens/s)"
    assert claims["speed"].SPEED.findall(line) == [("90.96", "860.40")]
    steps = [(4000.0, 1000.0), (2000.0, 1000.0), (1000.0, 1000.0), (500.0, 1000.0)]
    form = '| train_inner | {{"loss": "9", "wps": "{}", "ups": "2", "wpb": "{}", "bsz": "5"}}'
    log = "\n".join(form.format(rate, batch) for rate, batch in steps)
    assert claims["speed"]._median_step(log, "here") == 1.0
    with pytest.raises(UsageError, match="here: fairseq-train logged too few steps"):
        claims["speed"]._median_step("", "here")


def test_signals_reach_what_trains(claims):
    """And the command ends as that does."""
    body = "trap 'exit 7' TERM; kill -TERM $PPID; sleep 5 & wait"
    assert claims["children"].call(["bash", "-c", body])[0] == 7


def test_signals_that_come_before_its_start_reach_it(claims, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    popen = subprocess.Popen

    def slow(command, **_):
        os.kill(os.getpid(), signal.SIGTERM)
        child = popen(command, stdout=subprocess.PIPE)
        child.stdout.readline()
        return child

    monkeypatch.setattr(claims["children"].subprocess, "Popen", slow)
    assert claims["children"].call(["bash", "-c", "trap 'exit 7' TERM; echo; sleep 5 & wait"])[0] == 7
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_ends_what_is_timed_and_then_the_claim(claims):
    """Half of an output is no figure."""
    body = "trap 'echo half; exit 0' TERM; kill -TERM $PPID; sleep 5 & wait"
    with pytest.raises(SystemExit) as end:
        claims["children"].call(["bash", "-c", body], capture=True)
    assert end.value.code == 128 + signal.SIGTERM


def test_output_and_errors_are_told_apart(claims):
    assert claims["children"].call(["bash", "-c", "echo a; echo b >&2; exit 3"], capture=True) == (3, "a\n", "b\n")
    with pytest.raises(UsageError, match="here: decoding failed: b$"):
        claims["speed"].run(["bash", "-c", "echo a; echo b >&2; exit 3"], "here", "decoding")


@pytest.fixture
def timed(claims, tmp_path, monkeypatch):
    """timed(**options): what is measured of two trained systems, and the number of commands that this took."""
    records = []
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "averaged.pt").touch()
        records.append({"label": label, "done": [1], "folders": {1: str(tmp_path / label)}})
    calls = []

    def decode(folder):
        calls.append(folder)
        if folder.endswith("b") and broken:
            raise UsageError("b: out of memory")
        return 100.0

    broken = []
    monkeypatch.setattr(claims["speed"], "_decode", decode)
    monkeypatch.setattr(claims["speed"], "_train", lambda folder: 1.0)

    def measure(fails=False, **options):
        broken[:] = [True] * fails
        calls.clear()
        args = types.SimpleNamespace(**{"rounds": 2, "speed": True, "table_only": False, **options})
        return *claims["speed"].measure(records, str(tmp_path), args), len(calls)

    return measure


def test_a_look_does_not_lose_what_was_timed(timed):
    """Fewer rounds, --table-only or --speed false: the times that there are."""
    found, problems, calls = timed(rounds=3)
    assert set(found) == {"a", "b"} and not problems and calls == 6
    for options in ({"rounds": 2}, {"table_only": True}, {"speed": False}, {"rounds": 5, "table_only": True}):
        assert timed(**options) == (found, [], 0), options
    assert timed(rounds=4)[2] == 8


def test_a_copied_experiment_keeps_what_was_timed_and_another_model_does_not(timed, tmp_path):
    found, _, _ = timed()
    os.utime(tmp_path / "a/averaged.pt", (1, 1))
    assert timed(table_only=True) == (found, [], 0)
    (tmp_path / "a/averaged.pt").write_text("trained again")
    assert timed(table_only=True) == ({}, [], 0)


def test_nothing_is_timed_unasked(timed):
    assert timed(table_only=True) == ({}, [], 0)
    assert timed(speed=False) == ({}, [], 0)


def test_one_that_cannot_be_timed_leaves_the_others(timed):
    found, problems, calls = timed(fails=True)
    assert set(found) == {"a"} and problems == ["b: out of memory"] and calls == 3
    assert timed() == ({label: {"tokens_per_second": 100.0, "rounds": [100.0, 100.0], "step_seconds": 1.0}
                        for label in "ab"}, [], 4)  # fmt: skip


def test_a_translation_is_planned_by_the_command_that_the_recipe_left(claims, tmp_path):
    """As ``recipes/scripts.py`` writes it: a folder, and one line that the shell becomes."""
    (tmp_path / "recipe.sh").write_text('echo "$@" > asked; echo "fairseq-generate DATA --gen-subset test --beam 4"\n')
    (tmp_path / "cmd.sh").write_text(f"#!/usr/bin/env bash\ncd {tmp_path}\nexec bash recipe.sh --arch a -- --lr 1\n")
    found = claims["speed"].generate_command(str(tmp_path), "valid")
    assert found == ["fairseq-generate", "DATA", "--gen-subset", "valid", "--beam", "4"]
    asked = "--arch a --subsets test --stage 6 --stop-stage 6 --dry-run -- --lr 1\n"
    assert (tmp_path / "asked").read_text() == asked


def test_a_timed_training_has_a_schedule_that_fits_and_needs_no_other_run(claims, monkeypatch, tmp_path):
    flags = "--init-from old.pt --stack-restart-updates 600 --lr-scheduler inverse_sqrt_cooldown --warmup-updates 600"
    (tmp_path / "train.sh").write_text(f"fairseq-train DATA {flags} --max-update 3000\n")
    said = "".join(f'{{"wps": "100.0", "ups": "2", "wpb": "{batch}"}}\n' for batch in (900, 50, 50))
    calls = []
    monkeypatch.setattr(claims["speed"], "run", lambda words, *_: calls.append(words) or said)
    assert claims["speed"]._train(str(tmp_path)) == 0.5
    found = flags_of(calls[0])
    assert found["--warmup-updates"] == found["--cooldown-updates"] == "4" and found["--max-update"] == "40"
    assert not {"--init-from", "--stack-restart-updates"} & set(found)


def test_scores_are_found_among_warnings(claims, monkeypatch):
    said = "BLEU = 12.34\nnote: hypotheses end in ' .'\nfoo.py:3: UserWarning: a = b\n"
    monkeypatch.setattr(claims["fit"], "generate_command", lambda *_: ["fairseq-generate", "x", "y", "z"])
    monkeypatch.setattr(claims["fit"], "write_text", lambda *_: None)
    monkeypatch.setattr(claims["fit"], "run", lambda *_: said)
    assert claims["fit"]._bleu("here", "data", "test", "de") == 12.34
    with pytest.raises(UsageError, match="here: perplexity is missing"):
        claims["fit"]._perplexity("here", "data", "test")
    monkeypatch.setattr(claims["fit"], "run", lambda *_: "| valid on 'test' subset | loss nan | ppl nan")
    assert str(claims["fit"]._perplexity("here", "data", "test")) == "nan"
    monkeypatch.setattr(claims["fit"], "run", lambda *_: "| loss 20.2 | ppl 1.23457e+06 | num_updates 4")
    assert claims["fit"]._perplexity("here", "data", "test") == 1234570.0


def test_the_picture_by_depth_has_a_line_for_each_method_and_all_times_in_sight(claims, monkeypatch):
    by_depth = pytest.importorskip("fairseq_deep.recipes.compare.by_depth")
    drawn = []
    monkeypatch.setattr(by_depth.figures, "save_figure", lambda figure, path: drawn.append(figure))
    records = [
        {
            "label": f"{line}_{depth}",
            "line": line,
            "depth": depth,
            "bleu": {"mean": mean, "min": mean - 1, "max": mean + 1},
        }
        for line, depth, mean in (("plain", 30, 9.0), ("plain", 6, 20.0), ("DLCL", 6, 21.0), ("DLCL", 30, 22.0))
    ]
    records.append({"label": "control", "line": None, "depth": None, "bleu": {"mean": 18.0, "min": 18.0, "max": 18.0}})
    timed = {record["label"]: {"tokens_per_second": 2330.0 - 20 * index} for index, record in enumerate(records[:3])}
    by_depth.draw(records, timed, "by_depth.png")
    bleu, speed = drawn[0].axes
    assert [text.get_text() for text in bleu.get_legend().get_texts()] == ["plain", "DLCL"]
    assert [list(box.lines[0].get_ydata()) for box in bleu.containers] == [[20.0, 9.0], [21.0, 22.0]]
    assert [list(line.get_xdata()) for line in speed.lines] == [[6, 30], [6]]
    assert [list(line.get_ydata()) for line in speed.lines] == [[2310.0, 2330.0], [2290.0]]
    assert speed.get_ylim()[0] == 0 and speed.get_ylim()[1] > 2330 * 1.05
    by_depth.draw(records, {}, "by_depth.png")
    assert len(drawn[1].axes) == 1
