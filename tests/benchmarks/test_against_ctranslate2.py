"""benchmarks/against_ctranslate2.py: each system, built as its own process would build it, translates the same."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import against_ctranslate2 as benchmark  # noqa: E402
from against.fairseq_systems import write_dictionaries  # noqa: E402

needs_ctranslate2 = pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs ctranslate2")
SIZES = "--dim 64 --layers 1 --vocabulary 100 --sentences 4 --length 6 --beam 3 --rounds 1".split()


@pytest.fixture
def translate(tmp_path):
    """translate(system): {sentence: hypotheses} of random sentences."""
    write_dictionaries(tmp_path, 100)

    def run(system, *flags):
        settings = benchmark.read_arguments([*SIZES, "--systems", system, *flags])
        settings.data, settings.threads = str(tmp_path), 1
        worker = benchmark.make(system, settings)
        return worker.hypotheses(worker.translate())

    return run


def test_ours_has_the_hypotheses_of_stock(translate):
    stock = translate("stock")
    assert list(stock) == [0, 1, 2, 3]
    assert all(len(beam) == 3 and all(len(hypothesis) == 6 for hypothesis in beam) for beam in stock.values())
    assert translate("ours") == stock


@pytest.mark.parametrize("system", ["ours-int8", "dlcl", "lstm-int8", "merged", "average", "modern-int8"])
def test_every_model_translates(translate, system):
    assert [len(beam) for beam in translate(system).values()] == [3] * 4


@needs_ctranslate2
def test_ctranslate2_has_the_same_weights_and_search(translate):
    stock, other = translate("stock"), translate("ctranslate2")
    assert benchmark.share_of(stock, other, real=False) == 1
    assert benchmark.share_of(stock, translate("ctranslate2-int8"), real=False) > 0.3


def test_without_ctranslate2_one_line_says_so(translate, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(SystemExit, match="pip install ctranslate2"):
        translate("ctranslate2")


@pytest.mark.parametrize("system", ["fairseq", "ours-int4", "stock-int8"])
def test_unknown_systems_are_refused(capsys, system):
    with pytest.raises(SystemExit):
        benchmark.read_arguments(["--systems", "stock", system])
    assert f"no system {system}" in capsys.readouterr().err


def test_real_text_needs_a_checkpoint(capsys):
    with pytest.raises(SystemExit):
        benchmark.read_arguments(["--data", "bin"])
    assert "--checkpoint" in capsys.readouterr().err


def test_figures():
    assert benchmark.speed({"a": [1.0, 4.0, 3.0], "b": [2.0, 2.0, 2.0]}, "a", "b") == "1.500"
    assert benchmark.speed({"a": [1.0]}, "b", "a") == "-"
    first, second = {7: [[1, 2], [3]], 9: [[4], [5]]}, {7: [[3], [1, 2]], 9: [[4], [6]]}
    assert benchmark.share_of(first, second, real=False) == 0.75
    assert benchmark.share_of(first, second, real=True) == 0.5
