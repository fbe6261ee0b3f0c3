"""benchmarks/decoding.py, training.py and speed_and_quality.py: their tables, systems that fail; tests of mutations."""

import argparse
import importlib.util
import json
import os
import re
import sys

import pytest

from fairseq_deep.tools import results
from tests.helpers.exports import dictionary_of, write_model
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import decoding  # noqa: E402
import mutations  # noqa: E402
import speed_and_quality  # noqa: E402
import training  # noqa: E402
import turns  # noqa: E402

needs_ctranslate2 = pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs ctranslate2")
SMALL = "--dim 64 --layers 1 --vocabulary 200 --rounds 1".split()
SEARCH = "--sentences 5 --length 8 --beam 2 --max-len-a 0 --max-len-b 6 --systems".split()


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    """Workers are forks of this process, and there is no pause between them."""
    monkeypatch.setattr(turns, "START", "fork")
    monkeypatch.setattr(turns, "PAUSE", 0)


@pytest.fixture
def table(capsys):
    """table(benchmark, *words): {system: cells of its row}, in the order of the table."""

    def run(benchmark, *words):
        benchmark.main([*SMALL, *map(str, words)])
        machine, versions, *lines = capsys.readouterr().out.splitlines()
        assert "cores, load" in machine and "torch" in versions and "commit" in versions
        start = next(number for number, line in enumerate(lines) if line.startswith("system "))
        rows = [re.split(r"\s{2,}", line) for line in lines[start:]]
        return {name: dict(zip(rows[0][1:], cells)) for name, *cells in rows[1:]}

    return run


@needs_ctranslate2
def test_all_programs_translate_alike_and_other_models_do_not(table):
    systems = ["stock", "ours", "ctranslate2", "ours --arch transformer_dlcl_6l"]
    rows = table(decoding, *SEARCH, *systems)
    assert list(rows) == systems
    same = {name: float(row["equal"].rstrip("%")) for name, row in rows.items()}
    assert same["stock"] == same["ours"] == 100, "the same weights, and the same search"
    assert same["ctranslate2"] > same[systems[3]], "CTranslate2 differs only in translations cut at the limit"
    assert rows["stock"]["speed"] == "1.000" and all(float(row["sentences/s"]) > 0 for row in rows.values())


@needs_ctranslate2
def test_speed_and_quality_of_a_comparison_is_recorded(tmp_path, monkeypatch):
    """Stock fairseq and CTranslate2 have the weights of the first system and seed."""
    words = dictionary_of(["a b c d e f g"])
    (tmp_path / "seed4").mkdir()
    write_model(tmp_path / "seed4", "prenorm_6l", [words, words])
    results.add(str(tmp_path), [{"system": "a", "seed": seed, "folder": f"seed{seed}/model.pt"} for seed in (4, 5)])
    (tmp_path / "news").write_text("a b\nc d e\nf g a\n")
    monkeypatch.setattr(speed_and_quality, "TESTS", {"real-one": (1, 2)})
    output = tmp_path / "speeds.jsonl"
    texts = [word for name in ("input", "references") for word in (f"--{name}", str(tmp_path / "news"))]
    speed_and_quality.main([str(tmp_path), *texts, "--output", str(output), "--rounds", "1"])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["system"]: line for line in lines}
    assert list(found) == ["stock", "ctranslate2", "a", "ctranslate2-int8", "a-int8"]
    assert all(line["test"] == "real-one" and line["sentences_per_second"] > 0 for line in lines)
    assert found["stock"]["of_stock"] == found["ctranslate2-int8"]["of_ctranslate2"] == 1
    assert found["stock"]["bleu"] == found["a"]["bleu"]


class Failing:
    """A system whose second call fails, if its name says so."""

    def __init__(self, system, settings):
        self.system, self.calls = system, 0

    def work(self):
        self.calls += 1
        if self.system == "dies" and self.calls == 2:
            os._exit(9)
        if self.system == "fails" and self.calls == 2:
            raise RuntimeError("no memory")


def test_systems_that_fail_are_left_out(capsys):
    with turns.Turns(Failing, ["dies", "one", "fails", "two"], argparse.Namespace(threads=1)) as found:
        rounds = found.measure("work", 2)
    assert {system: len(each) for system, each in rounds.items()} == {"one": 2, "two": 2}
    assert found.problems == ["dies: its process ended without a word (too little memory?)",
                              "fails: RuntimeError: no memory"]  # fmt: skip
    said = capsys.readouterr().err
    assert all(f"left out: {problem}" in said for problem in found.problems) and "round 2: one " in said


def test_training_has_a_row_and_a_profile_for_each_system(table, capsys):
    sizes = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 64 --encoder-attention-heads 1"
    lstm = f"A_VARIABLE=1 transformer_lstm_6l {sizes} --decoder-attention-heads 1"
    systems = ["stock", "ours --optimizer fused_adam", lstm]
    rows = table(training, "--tokens", 64, "--batches", 1, "--systems", *systems)
    assert list(rows) == systems and "launches" not in rows["stock"]
    assert all(float(row["loss"]) > 1 and float(row["words a second"]) > 0 for row in rows.values())


def test_speed_is_the_median_of_ratios_within_rounds():
    first, second = [(1.0, 9), (4.0, 9), (3.0, 9)], [(2.0, 3), (2.0, 3), (2.0, 3)]
    assert turns.speed(first, second) == 1.5 and turns.speed(first, second, 1) == 3
    assert turns.median(first) == 3.0


def test_mutations_has_tests_of_every_package():
    for package, names in mutations.TESTS.items():
        assert (ROOT / "fairseq_deep" / package).is_dir() and all(mutations.test_file(ROOT, n) for n in names.split())
