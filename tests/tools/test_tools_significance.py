"""fairseq-deep score --against: sacreBLEU's paired bootstrap against sacreBLEU itself, and what is refused."""

import json
import os
import random

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from fairseq_deep.tools import UsageError, significance
from fairseq_deep.tools.main import main
from tests.helpers.tools import failing

fails = failing("score")

RNG = random.Random(3)
WORDS = "the old man did not see a red haired girl who was here".split()
REFERENCES = [" ".join(RNG.choice(WORDS) for _ in range(9)) + "." for _ in range(60)]


def worse(lines, share):
    """Replace about *share* of the words."""
    return [" ".join(w if RNG.random() > share else RNG.choice(WORDS) for w in line.split()) for line in lines]


SYSTEMS = {"good": worse(REFERENCES, 0.1), "bad": worse(REFERENCES, 0.4)}


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def run_folder(tmp_path):
    """What a recipe leaves of the system "bad"."""
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder / "test.hyp.de", SYSTEMS["bad"])
    write(folder / "test.ref.de", REFERENCES)
    return folder


@pytest.fixture
def words(tmp_path):
    """The arguments that score the system "good"."""
    write(tmp_path / "good", SYSTEMS["good"])
    write(tmp_path / "ref", REFERENCES)
    return ["--sys", str(tmp_path / "good"), "--ref", str(tmp_path / "ref")]


def test_as_sacrebleu_itself_with_a_fixed_seed(words, run_folder, tmp_path, capsys, monkeypatch):
    expected_of = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()}
    named = [("bad", SYSTEMS["bad"]), ("good", SYSTEMS["good"])]
    _, expected = PairedTest(named, expected_of, [REFERENCES], "bs", 200)()
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    printed = []
    for other in (run_folder, run_folder / "test.hyp.de"):
        out = tmp_path / "out.json"
        assert main(["score", *words, "--against", str(other), "--resamples", "200", "--json", str(out)]) == 0
        printed.append(capsys.readouterr().out)
        record = json.loads(out.read_text())
        assert (record["against"]["system"], record["against"]["resamples"]) == (str(other), 200)
        for name, key in (("BLEU", "BLEU"), ("chrF", "chrF2")):
            found = record["against"]["measures"][name]
            bad, good = expected[key]
            assert found["p"] == good.p_value and found["difference"] == pytest.approx(good.score - bad.score)
            assert found["ours"] == {"score": good.score, "mean": float(good.mean), "ci": float(good.ci)}
            assert found["other"] == {"score": bad.score, "mean": float(bad.mean), "ci": float(bad.ci)}
            assert "bs:200|seed:12345" in found["signature"]
        assert record["bleu"] == record["against"]["measures"]["BLEU"]["ours"]["score"]
    assert os.environ["SACREBLEU_SEED"] == "7"
    lines = printed[0].splitlines()
    assert lines[-1] == f"BLEU = {record['bleu']:.2f}" and "200 resamples, seed 12345" in printed[0]
    table = lines[lines.index("") + 2 : -2]
    assert len({len(line) for line in table[::2]}) == 1 and table[1].startswith(f"BLEU  {run_folder}")


def test_the_same_text_twice_is_no_difference(run_folder, capsys):
    words = ["--sys", run_folder / "test.hyp.de", "--ref", run_folder / "test.ref.de", "--against", run_folder]
    assert main(["score", *map(str, words), "--resamples", "50"]) == 0
    assert capsys.readouterr().out.count("+0.00  1.000") == 2


def test_texts_of_one_score_are_no_difference():
    """Two wrong words instead of two others: no statistic of BLEU differs."""
    one, other = ([line.replace("girl", word) for line in REFERENCES] for word in ("quux", "quiz"))
    assert one != other and one != REFERENCES
    found = significance.paired_bootstrap([("a", one), ("b", other)], [REFERENCES], {"BLEU": sacrebleu.BLEU()}, 50)
    assert found["BLEU"].results[0].score == found["BLEU"].results[1].score < 100
    assert found["BLEU"].results[1].p_value == 1.0


def test_the_first_system_against_several(run_folder):
    systems = [("bad", SYSTEMS["bad"]), ("good", SYSTEMS["good"]), ("bad again", SYSTEMS["bad"])]
    found = significance.paired_bootstrap(systems, [REFERENCES], {"BLEU": sacrebleu.BLEU()}, 100)["BLEU"]
    assert [result.p_value for result in found.results][::2] == [None, 1.0] and found.results[1].p_value < 0.05


def test_several_sets_of_references(words, run_folder, tmp_path, capsys):
    second = worse(REFERENCES, 0.2)
    write(tmp_path / "second", second)
    words += ["--ref", str(tmp_path / "second"), "--against", run_folder, "--resamples", "20"]
    assert "1 set(s) of references, not 2" in fails(capsys, *words)
    write(run_folder / "test.ref1.de", second)
    assert main(["score", *map(str, words)]) == 0
    assert "nrefs:2" in capsys.readouterr().out
    assert significance.read_run(str(run_folder)) == (SYSTEMS["bad"], [REFERENCES, second])


def test_what_cannot_be_compared_takes_one_line(words, run_folder, tmp_path, capsys):
    against = [*words, "--against", run_folder]
    for flag in ("--tokenized", "--compound-split"):
        assert "--against requires sacreBLEU" in fails(capsys, *against, flag)
    assert "--resamples requires another system; add it, or --against" in fails(capsys, *words, "--resamples", "5")
    assert "cannot read" in fails(capsys, *words, "--against", tmp_path / "nowhere")
    write(run_folder / "test.hyp.de", SYSTEMS["bad"][:59])
    assert "59 sentences, but the references 60" in fails(capsys, *against)
    write(run_folder / "test.ref.de", [*REFERENCES[:41], "another", *REFERENCES[42:]])
    assert "other references (line 42)" in fails(capsys, *against)
    write(run_folder / "test.ref.de", REFERENCES[:59])
    assert "59 sentences, but the references 60" in fails(capsys, *against)
    (run_folder / "test.ref.de").unlink()
    assert "has no test.ref.de" in fails(capsys, *against)
    write(run_folder / "test.hyp.en", REFERENCES)
    assert "translations into de, en; choose one with --lang" in fails(capsys, *against)
    for path in run_folder.iterdir():
        path.unlink()
    assert "has no test.hyp.LANG" in fails(capsys, *against)
    (run_folder / "seed2").mkdir()
    assert f"several seeds; give one, such as {run_folder}/seed2" in fails(capsys, *against)


def test_the_language_chooses_the_translations(run_folder):
    write(run_folder / "test.hyp.en", REFERENCES)
    assert significance.read_other(str(run_folder), [REFERENCES], "de") == SYSTEMS["bad"]
    with pytest.raises(UsageError, match="has no test.ref.en"):
        significance.read_other(str(run_folder), [REFERENCES], "en")
