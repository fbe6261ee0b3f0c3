"""fairseq-deep score --multilingual: each pair by sacreBLEU, and means written from their definitions."""

import json
import random
import statistics
import sys

import pytest
import sacrebleu

from fairseq_deep.cli import main

WORDS = "the old man did not see a red house by the green tree , because it was dark".split()


def sentences(rng, count=5):
    return [" ".join(rng.choice(WORDS) for _ in range(8)) + " ." for _ in range(count)]


def worsen(lines, rng, share):
    return [" ".join("x" if rng.random() < share else word for word in line.split()) for line in lines]


def make(folder, pairs, share, seed=0):
    """The same references for each call, and hypotheses with a *share* of wrong words (or {pair: share})."""
    folder.mkdir()
    for number, pair in enumerate(pairs):
        references = sentences(random.Random(number))
        wrong = share[pair] if isinstance(share, dict) else share
        hypotheses = worsen(references, random.Random(f"{pair}{seed}"), wrong)
        for kind, lines in (("hyp", hypotheses), ("ref", references)):
            (folder / f"test.{pair}.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def bleu(folder, pair):
    sides = [(folder / f"test.{pair}.{kind}").read_text(encoding="utf-8").splitlines() for kind in ("hyp", "ref")]
    return sacrebleu.corpus_bleu(sides[0], [sides[1]]).score


def score(capsys, tmp_path, folder, *words):
    assert main(["score", "--multilingual", str(folder), "--json", str(tmp_path / "s.json"), *map(str, words)]) == 0
    return json.loads((tmp_path / "s.json").read_text()), capsys.readouterr().out


# of which BLEU4 is the mean, and 90 others
LANGS = ["de", "zh", "br", "te", *(f"{a}{b}" for a in "kq" for b in "abcdefghijklmnopqrstuvwxyz"),
         *(f"v{a}" for a in "abcdefghijklmnopqrstuvwxyz"), *(f"y{a}" for a in "abcdefghijkl")]  # fmt: skip


def test_means_and_win_ratio_are_those_of_the_definitions(capsys, tmp_path):
    pairs = [f"en-{lang}" for lang in LANGS] + ["de-en", "fr-en"]
    worse = {pair: 0.5 if number % 3 else 0.0 for number, pair in enumerate(pairs)}
    ours, theirs = make(tmp_path / "ours", pairs, 0.25), make(tmp_path / "theirs", pairs, worse)
    result, said = score(capsys, tmp_path, ours, "--against", theirs)
    found = {pair: bleu(ours, pair) for pair in pairs}
    other = {pair: bleu(theirs, pair) for pair in pairs}
    assert result["pairs"] == pytest.approx(found)
    one = result["directions"]["en-xx"]
    assert one["pairs"] == 94 and "en-xx (BLEU94)" in said and "xx-en  " in said
    assert one["bleu"] == pytest.approx(statistics.fmean(found[pair] for pair in pairs[:94]))
    wins = sum(found[pair] > other[pair] for pair in pairs[:94])
    assert 0 < wins < 94 and one["win_ratio"] == pytest.approx(100 * wins / 94)
    assert one["bleu4"] == pytest.approx(statistics.fmean(found[f"en-{lang}"] for lang in ("de", "zh", "br", "te")))
    back = result["directions"]["xx-en"]
    assert back["bleu"] == pytest.approx((found["de-en"] + found["fr-en"]) / 2) and "bleu4" not in back
    assert result["bleu"] == pytest.approx(statistics.fmean(found.values()))
    assert "tok:13a" in result["signature"] and said.splitlines()[-1] == f"BLEU = {result['bleu']:.2f}"


def test_equal_translations_win_nothing(capsys, tmp_path):
    ours = make(tmp_path / "ours", ["en-de", "de-en"], 0.2)
    result, _ = score(capsys, tmp_path, ours, "--against", ours)
    assert [found["win_ratio"] for found in result["directions"].values()] == [0.0, 0.0]


def test_zero_shot_translations_have_a_language(capsys, tmp_path):
    folder = tmp_path / "zero"
    folder.mkdir()
    german = ["Das ist ein altes Haus am Rande der Stadt.", "Wir haben gestern den roten Wagen gesehen."]
    french = ["C'est une vieille maison au bord de la ville.", "Nous avons vu la voiture rouge hier soir."]
    texts = {"fr-de": (german[:1] + french[1:], german), "de-fr": (french, french), "nl-fr": ([french[0], ""], french)}
    for pair, sides in texts.items():
        for kind, lines in zip(("hyp", "ref"), sides):
            (folder / f"test.{pair}.{kind}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result, said = score(capsys, tmp_path, folder)
    found = result["directions"]["zero-shot"]
    assert found["language_accuracy"] == pytest.approx((50 + 100 + 50) / 3) and "language accuracy %" in said
    assert found["bleu"] == pytest.approx(statistics.fmean(bleu(folder, pair) for pair in texts))


def test_without_a_language_identifier_there_is_a_warning_and_no_accuracy(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    folder = make(tmp_path / "zero", ["fr-de"], 0.1)
    assert main(["score", "--multilingual", str(folder)]) == 0
    said = capsys.readouterr()
    assert "no language accuracy: pip install py3langid" in said.err and "language accuracy" not in said.out
