"""fairseq-deep score --multilingual: each pair by sacreBLEU, and means written from their definitions."""

import itertools
import json
import statistics
import sys

import pytest
import sacrebleu

from fairseq_deep.tools import multilingual

GERMAN = ["Das ist ein altes Haus am Rande der Stadt.", "Wir haben gestern den roten Wagen gesehen."]
FRENCH = ["C'est une vieille maison au bord de la ville.", "Nous avons vu la voiture rouge hier soir."]
MIXED = [GERMAN[0], FRENCH[1]]


@pytest.fixture
def score(command, tmp_path):
    """score(OURS, OTHERS): the record, what is printed and the warnings for {pair: (hypotheses, references)}."""

    def score(ours, others=None):
        words, number = [], itertools.count()
        for flag, texts in (("--multilingual", ours), ("--against", others)):
            folder = tmp_path / f"{next(number)}"
            folder.mkdir()
            for pair, sides in (texts or {}).items():
                for kind, lines in zip(("hyp", "ref"), sides):
                    (folder / f"test.{pair}.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
            words += [flag, folder] if texts else []
        code, said, errors = command("score", *words, "--json", tmp_path / "out.json")
        assert code == 0, errors
        return json.loads((tmp_path / "out.json").read_text()), said, errors

    return score


def bleu(sides):
    return sacrebleu.corpus_bleu(sides[0], [sides[1]]).score


def test_means_and_win_ratio_are_those_of_the_definitions(score):
    pairs = ["en-de", "en-zh", "en-br", "en-te", *(f"en-k{letter}" for letter in "abcde"), "de-en", "fr-en"]
    hypotheses = itertools.cycle([GERMAN, MIXED, GERMAN[:1] * 2])
    ours = {pair: (next(hypotheses), GERMAN) for pair in pairs}
    theirs = {pair: (MIXED, GERMAN) for pair in pairs}  # better than one third, and equal to another
    result, said, _ = score(ours, theirs)
    found = {pair: bleu(sides) for pair, sides in ours.items()}
    assert result["pairs"] == pytest.approx(found)
    one, back = (result["directions"][name] for name in ("en-xx", "xx-en"))
    assert one["pairs"] == 9 and one["bleu"] == pytest.approx(statistics.fmean(found[pair] for pair in pairs[:9]))
    wins = sum(found[pair] > bleu(theirs[pair]) for pair in pairs[:9])
    assert 0 < wins < 9 and one["win_ratio"] == pytest.approx(100 * wins / 9)
    assert one["bleu4"] == pytest.approx(statistics.fmean(found[pair] for pair in pairs[:4]))
    assert back["bleu"] == pytest.approx((found["de-en"] + found["fr-en"]) / 2) and "bleu4" not in back
    assert result["bleu"] == pytest.approx(statistics.fmean(found.values()))
    assert "tok:13a" in result["signature"] and said.splitlines()[-1] == f"BLEU = {result['bleu']:.2f}"
    result["directions"]["en-xx"]["pairs"] = 94
    assert "en-xx (BLEU94)" in multilingual.report(result) and "BLEU94" not in said


def test_zero_shot_translations_have_a_language(score):
    texts = {"fr-de": (MIXED, GERMAN), "de-fr": (FRENCH, FRENCH), "nl-fr": ([FRENCH[0], ""], FRENCH)}
    result, said, _ = score(texts)
    found = result["directions"]["zero-shot"]
    assert found["language_accuracy"] == pytest.approx((50 + 100 + 50) / 3) and "language accuracy %" in said
    assert found["bleu"] == pytest.approx(statistics.fmean(map(bleu, texts.values())))


def test_without_a_language_identifier_there_is_a_warning_and_no_accuracy(score, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    _, said, errors = score({"fr-de": (GERMAN, GERMAN)})
    assert "no language accuracy: pip install py3langid" in errors and "language accuracy" not in said
