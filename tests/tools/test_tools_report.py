"""``fairseq-deep report``: one HTML page about an experiment, from nothing but what a recipe leaves."""

import html
import json
import re
import sys

import pytest

from fairseq_deep.cli import main
from fairseq_deep.tools import report as tool
from fairseq_deep.tools import results
from tests.helpers.runs import GENERATED, RECORD, make_run

pytest.importorskip("matplotlib")


def report(folder, *words):
    """The page, and the text that it shows."""
    assert main(["report", str(folder), *map(str, words)]) == 0
    page = (folder / "report.html").read_text()
    return page, html.unescape(" ".join(re.sub("(?s)<style.*?</style>|<[^>]+>", " ", page).split()))


def test_what_the_page_says(tmp_path):
    page, text = report(make_run(tmp_path / "job"), "--title", "my <b>job</b>")
    for part in ("my <b>job</b>", "12.35", "40.50", "1,234,567", "transformer_dlcl_30l", "nrefs:1|tok:13a"):
        assert part in text, part
    assert "train 22,000 pairs; sha256 en eeeeeeeeeeeeeeee…" in text
    assert "exp/other: paired bootstrap, 1,000 resamples" in text
    assert "+2.35" in text and "0.012" in text and "4 of 4 sentences" in text
    assert re.search(r"\blr 0\.002\b", text), "of a flag given twice, the last counts"
    assert re.search(r"\bplugins a b\b", text), "all words of a value"
    assert page.count("<svg") == 1 and text.count("learning rate") == 1


def test_without_matplotlib_the_page_has_no_curves_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page, text = report(make_run(tmp_path / "job"))
    assert "This page has no curves: matplotlib is not installed" in text and "<svg" not in page
    assert "12.35" in text and "das Haus" in text
    assert "the page has no curves: matplotlib is not installed" in capsys.readouterr().err


def test_it_needs_no_other_file_and_runs_no_text(tmp_path):
    page, text = report(make_run(tmp_path / "job"))
    assert "<script" not in page and "<i>" not in page
    assert "das <script>alert(1)</script>" in text and "the <i>house</i>" in text
    assert not re.search(r""" (src|href|xlink:href|data|srcset)=["'](?!#)|@import|url\((?!#)""", page)


def test_samples_are_spread_evenly(tmp_path):
    folder, flags = make_run(tmp_path / "job"), {"source-lang": "en", "target-lang": "de"}
    found = tool.choose_samples(str(folder), flags, 2)
    assert found["sentences"] == 4 and [one["line"] for one in found["samples"]] == [1, 3]
    assert found["samples"][1]["chrf"] == 100.0 and found["samples"][1]["alignment"] is None


def test_alignments_of_subwords_are_shown_as_they_are(tmp_path):
    (tmp_path / "out").write_text(GENERATED)
    second, first = tool.from_output(str(tmp_path / "out"))[::-1]
    assert (second["source"], second["ours"], second["line"]) == ("the house", "das Haus", 2)
    tokens = {"source": ["the", "hou@@", "se"], "target": ["das", "Ha@@", "us"]}
    assert second["alignment"] == {**tokens, "links": {(0, 0), (1, 1), (2, 2)}}
    assert first["alignment"] is None, "three links for two words: --remove-bpe has joined what they count"
    page, text = report(make_run(tmp_path / "job"), "--generate-output", tmp_path / "out")
    assert text.count("alignment") == 1 and "hou@@" in text
    assert page.count('class="linked"') == 3


def test_several_seeds(tmp_path):
    folder = tmp_path / "job"
    for seed in (1, 2):
        make_run(folder / f"seed{seed}")
    mean = {"mean": 12.345, "std": 0.5, "min": 12, "max": 13}
    summary = {"bleu": mean, "seeds": [1, 2], "failed": [3], "runs": {"1": RECORD, "2": RECORD}, "signature": "x"}
    (folder / "RESULT.json").write_text(json.dumps(summary))
    page, text = report(folder)
    assert "BLEU, mean of 2 12.35 ± 0.50" in text and "3 failed" in text
    assert "seed 1" in text and "seed 2" in text  # in the legend of the curves


def test_a_comparison(tmp_path):
    """From its ``results.jsonl`` alone: means of the seeds, common flags, one curve for each system."""
    folder = tmp_path / "compared"
    folder.mkdir()
    for name, losses in (("plain", (4.0, 5.0)), ("dlcl & co", (3.0, 3.5))):
        runs = [
            {"system": name, "seed": seed, "command": f"arch_{name}", "parameters": 1234567, "valid_loss": loss,
             "flags": {"--lr": "0.002", "--seed": str(seed)}, "environment": {"torch": "2.x"}, "commit": "abc",
             "curve": {"10": loss + 1, "20": loss}}
            for seed, loss in enumerate(losses, 1)
        ]  # fmt: skip
        assert len(results.add(str(folder), runs)) == (2 if name == "plain" else 4)
    page, text = report(folder)
    assert "plain 2 1,234,567 4.500 [4.000, 5.000]" in text and "3.250 [3.000, 3.500]" in text
    assert "--lr 0.002" in text and "--seed" not in text and "arch_dlcl & co" in text
    assert "<svg" in page and "BLEU" not in text


def test_before_the_end(tmp_path):
    folder = make_run(tmp_path / "job", record=None, texts={})
    (folder / "train.jsonl").write_text("")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs/4-train.log").write_text("2026-11-27 | INFO | fairseq.tasks.text_to_speech | loading\n")
    page, text = report(folder)
    assert "has not come to its end" in text and "<svg" not in page and "Translations" not in text
