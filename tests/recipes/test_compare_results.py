"""Results of a comparison: values and their spread over seeds, parts of the test set, table and picture."""

import hashlib
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import trainings, watch
from fairseq_deep.recipes.compare import driver, picture, results, table
from fairseq_deep.recipes.compare.options import Compare
from fairseq_deep.recipes.compare.systems import System
from fairseq_deep.recipes.record import result_line
from fairseq_deep.tools.results import read
from tests.helpers.runs import make_run

LINES = {"ref": [f"the number {n} is on line {n * n} of this text" for n in range(60)]}
LINES["good"] = [line.replace("text", "page") if n % 3 else line.title() for n, line in enumerate(LINES["ref"])]
LINES["bad"] = [line.replace("is on line", "was at place") if n % 4 else line for n, line in enumerate(LINES["good"])]


def bleu(name):
    return sacrebleu.corpus_bleu(LINES[name], [LINES["ref"]]).score


def plan(folder):
    """What a run needs of its plan."""
    options = SimpleNamespace(source_lang="en", target_lang="de", lowercase="worse" in str(folder), stop_stage=7)
    return SimpleNamespace(exp=str(folder), options=options, keys=["key"] * 8)


def write_run(folder, kind, losses, parameters):
    """A finished training as the recipe leaves it."""
    result = {"bleu": round(bleu(kind), 2), "parameters": parameters, "signature": "s", "tokens_per_update": 64,
              "updates": 4}  # fmt: skip
    make_run(folder, result, {"test.hyp.de": LINES[kind], "test.ref.de": LINES["ref"], ".done.7": ["key"],
                              "logs/6-generate.log": ["Translated 60 sentences (90 tokens) in 2.0s (30.00 sentences/s, "
                                                      "45.0 tokens/s)"]})  # fmt: skip
    # what was done once more after a stop counts as it was the last time
    valid = [{"kind": "valid", "epoch": 1, "valid_num_updates": number, "valid_loss": loss, "valid_ppl": 2**loss}
             for number, loss in ((3, 0.1), *enumerate(losses, 1))]  # fmt: skip
    train = [{"kind": "train_inner", "num_updates": n, "wps": 100, "wpb": 50, "ratio_enc": n} for n in (1, 2, 6)]
    lines = (json.dumps({"time": 1, "session": 1, **record}) for record in (*train, *valid))
    (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def finished(tmp_path):
    """Rows of three systems with three seeds; one training failed, one has not started."""
    systems = [System(name, f"transformer_{name}", []) for name in ("base", "same", "worse")]
    runs = []
    for system in systems:
        for seed in (1, 2, 3):
            run = trainings.Run(system, seed, plan(tmp_path / system.label / f"seed{seed}"))
            runs.append(run)
            if system.label == "worse" and seed > 1:
                continue
            kind = "bad" if system.label == "worse" else "good"
            write_run(Path(run.folder), kind, [9 + seed, 7 + seed, 8 + seed], 1000 * len(system.label))
    failed = Path(runs[7].folder)
    failed.mkdir(parents=True)
    (failed / "failure.txt").write_text("stage 4 (train) failed: loss is NaN\n")
    return results.rows(systems, runs), runs


def test_values_and_their_spread_over_seeds(finished):
    rows, _ = finished
    base, same, worse = rows
    assert base["valid_loss"] == {"mean": 9.0, "min": 8.0, "max": 10.0, "std": 1.0} and base["difference"] is None
    assert base["curve"][2] == {1: 11.0, 2: 9.0, 3: 10.0}
    assert base["seeds"][1]["ratio_encoder"] == 2 and base["seeds"][1]["ratio_decoder"] is None
    assert base["seeds"][1]["step_seconds"] == 0.5 and base["seeds"][1]["tokens_per_second"] == 45
    assert worse["done"] == [1] and worse["failed"] == {2: "stage 4 (train) failed: loss is NaN"}
    assert worse["difference"]["mean"] == pytest.approx(bleu("bad") - bleu("good"), abs=0.01)
    assert worse["bleu"]["std"] is None
    assert (same["tests"]["p"], worse["tests"]) == (1, {}), "one seed has no p"


def test_halves_and_domains_of_the_test_set(finished, tmp_path):
    """The hash of the source alone decides; domains are of the reporting half, and all tests are on it.

    The scores of "worse" are without case, as its options are.
    """
    _, runs = finished
    sources = [f"sentence {n % 50}" for n in range(60)]
    tags = ["php" if n % 3 else "news" for n in range(60)]
    for name, lines in (("base/seed1/text/raw/test.en", sources), ("base/seed1/score-test.json", []), ("tags", tags)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    numbers = [int(hashlib.sha256(source.encode()).hexdigest()[:2], 16) for source in sources]
    reporting = [n for n in range(60) if numbers[n] % 2]
    wanted = {"choosing": [n for n in range(60) if n not in reporting], "reporting": reporting}
    wanted.update((tag, [n for n in reporting if tags[n] == tag]) for tag in ("php", "news"))
    parts = results.read_parts(runs, str(tmp_path / "tags"), True)
    assert parts == wanted and all(parts.values())
    assert results.read_parts(runs, str(tmp_path / "tags"), False).keys() == {"php", "news"}
    assert results.read_parts(runs, "", False) == {}
    rows = results.rows([run.system for run in runs[::3]], runs, str(tmp_path), parts, 0.25)
    base, same, worse = rows
    for (part, indices), (row, kind) in itertools.product(parts.items(), ((base, "good"), (worse, "bad"))):
        hypotheses, references = ([LINES[name][n] for n in indices] for name in (kind, "ref"))
        for name, metric in (("bleu", sacrebleu.BLEU), ("chrf", sacrebleu.CHRF)):
            score = metric(lowercase=row is worse).corpus_score(hypotheses, [references]).score
            expected = pytest.approx(score, abs=0.006)
            assert row[f"{name} {part}"]["mean"] == expected, (row["system"], name, part)
    assert base["bleu"] == base["bleu reporting"] != base["bleu choosing"]
    assert worse["difference"]["mean"] == pytest.approx(worse["bleu"]["mean"] - base["bleu"]["mean"])
    assert (same["tests"], worse["tests"]) == ({"half": 0, "p": 1, "p_equal": 0, "margin": 0.25}, {})
    assert read(str(tmp_path))[0]["bleu"] == round(bleu("good"), 2), "the record has the whole test set"
    text = table.write(str(tmp_path), rows, results.facts(rows))
    assert "| BLEU, choosing | BLEU, php | BLEU, news |" in re.sub(" +", " ", text) and "BLEU, reporting" not in text
    assert "p equal: of a difference of 0.25 BLEU or more" in text and "tests: reporting half of the test set" in text
    source = tmp_path / "base/seed1/text/raw/test.en"
    for tags, text, problem in (
        ("php\n", sources, "tags has 1 lines for 60 test sentences: give one domain per line"),
        *(("news\n" * 59 + f"{odd}\n", sources, f"tags: '{odd}' cannot name a domain: give it another name")
          for odd in ("reporting", "")),
        ("news\n", ["one"], "a half of the 1 test sentences is empty: omit --halves"),
    ):  # fmt: skip
        (tmp_path / "tags").write_text(tags)
        source.write_text("".join(line + "\n" for line in text))
        with pytest.raises(UsageError, match=problem):
            results.read_parts(runs, str(tmp_path / "tags"), True)


def test_table_and_picture_of_what_is_there(finished, tmp_path):
    rows, _ = finished
    folder = str(tmp_path)
    text = table.write(folder, rows, results.facts(rows))
    lines = text.splitlines()
    assert len({len(line) for line in lines[:5]}) == 1 and len({line.count("|") for line in lines[:5]}) == 1
    assert "source gain" not in lines[0], "no run has it"
    assert "| 9.000 [8.000, 10.000] |" in lines[2] and "1 of 3 (1 FAILED)" in lines[4]
    assert "- FAILED: worse, seed 2: stage 4 (train) failed: loss is NaN" in lines
    assert "seeds 1, 2, 3" in text
    base, same, worse = json.loads((tmp_path / "table.json").read_text())["systems"]
    assert [row["system"] for row in (base, same, worse)] == ["base", "same", "worse"]
    assert base["valid_loss"]["max"] == 10.0 and [*worse["failed"]] == ["2"] and worse["bleu"]["std"] is None
    pytest.importorskip("matplotlib")
    picture.draw(rows, str(tmp_path / "picture.svg"))
    drawn = (tmp_path / "picture.svg").read_text()
    rows[2]["curve"][1][4] = math.inf
    rows[1]["curve"][1] = {100: 8.0}  # an update that no other seed has
    picture.draw(rows, str(tmp_path / "infinite.svg"))
    assert all(re.findall(rf">{name}( +0.00M)?<", drawn) for name in ("base", "same", "worse")), "legend and ranking"


def test_without_matplotlib_there_is_a_table_all_the_same(finished, monkeypatch, tmp_path, capsys):
    rows, _ = finished
    monkeypatch.setattr(driver.results, "rows", lambda *_: rows)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    driver.report(Compare(exp=str(tmp_path), tables=""), [], [])
    printed = capsys.readouterr().out
    assert "pip install matplotlib" in printed.splitlines()[-1] and (tmp_path / "table.md").exists()
    assert not (tmp_path / "picture.png").exists()


def test_losses_at_equal_time():
    """Those of the slower ones where they were when the fastest had done all of its updates."""
    curves = {
        "fast": {1: {10: 6.0, 20: 5.0}, 2: {10: 6.5, 20: 5.5}},
        "slow": {1: {10: 4.0, 20: 3.0}, 2: {12: 4.0, 20: 3.0}},
        "untimed": {1: {10: 9.0}},
        "slowest": {1: {10: 8.0}},
    }
    steps = {"fast": 1.0, "slow": 4 / 3, "untimed": None, "slowest": 4.0}
    rows = [{"done": list(seeds), "curve": seeds, "seeds": {seed: {"step_seconds": steps[name]} for seed in seeds}}
            for name, seeds in curves.items()]  # fmt: skip
    results.add_equal_time(rows)
    found = [[figures.get("equal_time") for figures in row["seeds"].values()] for row in rows]
    assert found == [[5.0, 5.5], [pytest.approx(3.5), pytest.approx(3.625)], [None], [None]]
    results.add_equal_time([])


def test_the_last_line_of_a_training_may_be_torn(finished):
    folder = Path(finished[1][0].folder)
    whole = result_line(str(folder), seed=1)
    with open(folder / "train.jsonl", "a") as stream:
        stream.write('{"kind": "valid", "valid_num_up')
    train = watch.Train(str(folder), (0, 0, 0))
    train.note("session", {"commit": "x"})
    train.finish(True)
    assert json.loads((folder / "train.jsonl").read_text().splitlines()[-1])["commit"] == "x"
    assert result_line(str(folder), seed=1) == whole
