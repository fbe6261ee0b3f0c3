"""fairseq-deep score --against: sacreBLEU's paired bootstrap against sacreBLEU itself."""

import json
import os
import random

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from fairseq_deep.tools import significance

RNG = random.Random(3)
WORDS = "the old man did not see a red haired girl who was here".split()
REFERENCES = [" ".join(RNG.choice(WORDS) for _ in range(9)) + "." for _ in range(60)]


def worse(lines, share):
    """Replace about *share* of the words."""
    return [" ".join(w if RNG.random() > share else RNG.choice(WORDS) for w in line.split()) for line in lines]


GOOD, BAD = worse(REFERENCES, 0.1), worse(REFERENCES, 0.4)


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def run_folder(tmp_path):
    """What a recipe leaves of the bad system."""
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder / "test.hyp.de", BAD)
    write(folder / "test.ref.de", REFERENCES)
    return folder


@pytest.fixture
def words(tmp_path):
    """The arguments that score the good system."""
    write(tmp_path / "good", GOOD)
    write(tmp_path / "ref", REFERENCES)
    return ["--sys", str(tmp_path / "good"), "--ref", str(tmp_path / "ref")]


def test_it_is_sacrebleu_itself_with_a_fixed_seed(words, run_folder, tmp_path, command, monkeypatch):
    metrics = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()}
    _, expected = PairedTest([("bad", BAD), ("good", GOOD)], metrics, [REFERENCES], "bs", 200)()
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    printed = []
    for other in (run_folder, run_folder / "test.hyp.de"):
        out = tmp_path / "out.json"
        code, said, _ = command("score", *words, "--against", other, "--resamples", "200", "--json", out)
        printed.append(said)
        record = json.loads(out.read_text())
        assert (code, record["against"]["system"], record["against"]["resamples"]) == (0, str(other), 200)
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


def test_the_same_text_and_texts_of_one_score_are_no_difference(run_folder, command):
    words = ["--sys", run_folder / "test.hyp.de", "--ref", run_folder / "test.ref.de", "--against", run_folder]
    assert command("score", *words, "--resamples", "50")[1].count("+0.00  1.000") == 2
    # two wrong words instead of two others: no statistic of BLEU differs
    one, other = ([line.replace("girl", word) for line in REFERENCES] for word in ("quux", "quiz"))
    found = significance.paired_bootstrap([("a", one), ("b", other)], [REFERENCES], {"BLEU": sacrebleu.BLEU()}, 50)
    first, second = found["BLEU"].systems
    assert one != other and first["score"] == second["score"] < 100 and second["p"] == 1.0


def test_several_sets_of_references(words, run_folder, tmp_path, command):
    second = worse(REFERENCES, 0.2)
    write(tmp_path / "second", second)
    write(run_folder / "test.ref1.de", second)
    words += ["--ref", tmp_path / "second", "--against", run_folder, "--resamples", "20"]
    assert "nrefs:2" in command("score", *words)[1]
    assert significance.read_run(str(run_folder)) == (BAD, [REFERENCES, second])


def test_the_language_chooses_the_translations(run_folder):
    write(run_folder / "test.hyp.en", REFERENCES)
    assert significance.read_other(str(run_folder), [REFERENCES], "de") == BAD
