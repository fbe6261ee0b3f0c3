"""The text of the recipes: what is refused, cleaned and noted; sub-words; and translate prepares text alike."""

import gzip
import json
import multiprocessing
import os
import random
import signal
from types import SimpleNamespace

import pytest
from subword_nmt.apply_bpe import BPE

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.recipe import Recipe
from fairseq_deep.recipes.text import corpus, subwords
from fairseq_deep.runtime import TextSteps, find_bundle
from tests.helpers.recipes import LANGS, lines, write_pairs

LETTERS = {"en": "abcdefg", "de": "uvwxyzä"}


def word(lang, rng):
    return "".join(rng.choice(LETTERS[lang]) for _ in range(rng.randint(2, 5)))


@pytest.fixture
def text(tmp_path):
    """Sentences of two alphabets; the ninth pair is longer than the others."""
    rng, folder = random.Random(3), tmp_path / "given"
    pairs = [tuple(" ".join(word(lang, rng) for _ in range(3)) for lang in LANGS) for _ in range(120)]
    pairs[8] = tuple(" ".join([side] * 4) for side in pairs[8])
    write_pairs(folder, train=pairs[:100], valid=pairs[100:110], test=pairs[110:115], test1=pairs[115:120])
    return folder


def append(folder, split, *sides):
    for lang, side in zip(LANGS, sides):
        with open(folder / f"{split}.{lang}", "a", encoding="utf-8") as stream:
            stream.write(f"{side}\n")


def copied(text, tmp_path):
    corpus.copy_corpus(str(text), str(tmp_path / "out"), LANGS, "")
    return tmp_path / "out"


def test_text_is_cleaned_and_recorded(text, tmp_path, capsys):
    """Empty training pairs go, empty test lines stay; white space that splits lines elsewhere becomes a blank."""
    expected = {lang: lines(text / f"train.{lang}") for lang in LANGS}
    for sides in (("", "leer"), ("empty", " ")):
        append(text, "train", *sides)
    for sides in (("", "leer"), ("a\u2028b\x85c\rd", "x\x0cy")):
        append(text, "test", *sides)
    for number in (1, 2):
        (text / f"test.de.ref{number}").write_text(f"das  Haus {number}\n" * 7)
    content = b"\xef\xbb\xbf" + (text / "train.de").read_bytes()  # a byte order mark is no part of the first word
    (text / "train.de").unlink()
    (text / "train.de.gz").write_bytes(gzip.compress(content))
    out, said = copied(text, tmp_path), capsys.readouterr().out
    assert {lang: lines(out / f"train.{lang}") for lang in LANGS} == expected
    assert (out / "test.en").read_text().split("\n")[-3:] == ["", "a b c d", ""] and lines(out / "test.de")[-1] == "x y"
    assert (out / "test.de.ref2").read_text() == "das Haus 2\n" * 7
    facts = json.loads((out / "data.json").read_text())["sets"]
    assert (facts["train"]["pairs"], facts["train"]["dropped"], facts["test"]["pairs"]) == (100, 2, 7)
    assert [*facts["test"]["references"]] == ["test.de.ref1", "test.de.ref2"]
    assert "dropped 2 with an empty side" in said and "3 references per sentence" in said


PACKED = gzip.compress(random.Random(1).randbytes(400).hex().encode() + b"\n")
BAD = [
    ({"train.de": b"a\n"}, "train.en has 100 lines but .*train.de has 1"),
    *(({f"{split}.{lang}": b"" for lang in LANGS}, f"{split}.en and .* no sentence pair")
      for split in ("train", "valid", "test")),
    ({f"valid.{lang}": b"a\n" * 3 for lang in LANGS}, "valid.en and valid.de have the same text"),
    ({"valid.de": b"gut\n" * 4 + "sch\xf6n\n".encode("latin-1")}, "valid.de is not UTF-8 .line 5."),
    ({"train.de.gz": PACKED[:200]}, "cannot read .*train.de.gz after line .*copy it again"),
    *(({"train.de.gz": PACKED[:place] + b"\xff" * 8 + PACKED[place + 8 :]}, "train.de.gz") for place in (2, 40, 300)),
    *(({f"test.de.ref{number}": b"a\n" * 5 for number in numbers}, f"test.de.ref{odd}: number the references test.de")
      for numbers, odd in (((2,), 2), ((1, 3), 3), ((0, 1), 0), (("01",), "01"))),
    ({"test.de.ref1": b"a\n" * 4}, "test.en has 5 lines but .*test.de.ref1 has 4: give files of equal length"),
    ({f"test3.{lang}": b"a\n" for lang in LANGS}, "test3.en: number the test sets .*, without a gap"),
]  # fmt: skip


@pytest.mark.parametrize("files, problem", BAD)
def test_bad_text_is_refused(text, tmp_path, files, problem):
    for name, content in files.items():
        (text / name).write_bytes(content)
        if name.endswith(".gz"):
            (text / name).with_suffix("").unlink()
    with pytest.raises(UsageError, match=problem):
        copied(text, tmp_path)
    assert not list(tmp_path.glob("out*"))


def test_what_makes_a_score_mean_less_is_noted(text, tmp_path, capsys):
    copied(text, tmp_path)
    assert "note" not in capsys.readouterr().out
    pair = tuple(lines(text / f"train.{lang}")[3] for lang in LANGS)
    for _ in range(5):
        append(text, "train", "same", "same")
    append(text, "test", *pair)
    copied(text, tmp_path)
    said = capsys.readouterr().out
    assert "note: 5 % of the training pairs have the same text on both sides" in said
    assert "note: 1 of 6 test sources are also training sources" in said and "valid sources" not in said


@pytest.mark.parametrize("split, counts, tokens, problem", [
    ("train", (50, 1), 50, r"train\.en, line 101:.*51 sub-words, more than 50.*or set --max-subwords 49"),
    ("valid", (40, 1), 50, r"valid\.en, line 11:.*more than 40.*--max-source-positions.*shorten the line"),
    ("valid", (1, 30), 50, r"valid\.de, line 11:.*more than 30.*--max-target-positions"),
    ("test", (1, 30), 50, r"test\.de, line 6:.*31 sub-words, more than 30.*--max-target-positions"),
    ("valid", (20, 1), 20, r"valid\.en, line 11:.*more than 20.*raise --max-tokens"),
    ("train", (49, 49), 50, ""), ("valid", (39, 29), 50, ""), ("test", (39, 29), 50, ""),
])  # fmt: skip
def test_lines_that_are_too_long_are_refused_before_training(text, split, counts, tokens, problem):
    append(text, split, *("a " * count for count in counts))
    check = lambda: corpus.check_lengths(str(text), LANGS, tokens, {"en": 40, "de": 30})  # noqa: E731
    if not problem:
        return check()
    with pytest.raises(UsageError, match=problem):
        check()


def cut(text, out, bpe="joint", merges=30, most=0, lowercase=False, langs=LANGS, workers=1):
    options = Recipe(bpe=bpe, bpe_merges=merges, max_words=50, max_subwords=most, lowercase=lowercase, workers=workers)
    subwords.cut_corpus(str(text), str(out), SimpleNamespace(langs=langs, options=options))
    return out


def steps_of(out, langs=LANGS):
    """What ``translate`` does with text, for a checkpoint beside these sub-words."""
    (out / "model.pt").touch()
    bundle = find_bundle(str(out / "model.pt"))
    return TextSteps(*langs, bundle.codes, bundle.tokenizer, bundle.lowercase)


def test_each_side_has_merges_of_its_own(text, tmp_path):
    cut(text, tmp_path / "out", "per-side", 3)  # is replaced, with its merges
    out = cut(text, tmp_path / "out", "per-side")
    for lang, name in (("en", "code"), ("de", "code.de")):
        learned = "".join(lines(out / name)[1:]).replace("</w>", "").replace(" ", "")
        assert learned and {*learned} <= {*LETTERS[lang]}
        with open(out / name, encoding="utf-8") as stream:
            merges = BPE(stream)
        for split in ("train", "test", "test1"):
            assert lines(out / f"{split}.{lang}") == [*map(merges.process_line, lines(text / f"{split}.{lang}"))]


def test_references_are_tokenised(text, tmp_path):
    (text / "test.de.ref1").write_text("Das, Haus.\n" * 5)
    out = cut(text, tmp_path / "out", lowercase=True, workers=2)
    assert lines(out / "test.de.ref1.tok") == ["das , haus ."] * 5
    assert lines(out / "test.de.tok") == lines(text / "test.de"), "these are lower-cased words already"
    assert len([*out.glob("*.tok*")]) == 4, "all references of valid, test and test1"


def test_pairs_with_many_words_or_of_unequal_length_are_dropped(text, tmp_path, capsys):
    for words in ((50, 50), (51, 51), (18, 2), (19, 2)):
        append(text, "train", *("a " * count for count in words))
    assert len(lines(cut(text, tmp_path / "out") / "train.de")) == 102
    assert "2 training pairs dropped: over 50 words or a length ratio over 9" in capsys.readouterr().out


def test_pairs_with_many_sub_words_are_dropped(text, tmp_path, capsys):
    whole = cut(text, tmp_path / "whole")
    pairs = [*zip(lines(whole / "train.en"), lines(whole / "train.de"))]
    kept = pairs[:8] + pairs[9:]
    limit = max(len(side.split()) for pair in kept for side in pair)
    short = cut(text, tmp_path / "short", most=limit)
    assert f"1 training pairs dropped: over {limit} sub-words" in capsys.readouterr().out
    assert [*zip(lines(short / "train.en"), lines(short / "train.de"))] == kept
    assert lines(short / "test1.de") == lines(whole / "test1.de") and not [*short.glob("*.short")]
    with pytest.raises(UsageError, match="no training pair has 1 to 2 sub-words"):
        cut(text, tmp_path / "short", most=2)


def test_pieces_of_the_text_as_it_is_behind_the_tag_of_a_language(text, tmp_path):
    """The tag is one word and no text to learn from; joined pieces are the text again."""
    tagged = [f"<2{lang}> {line}" for line, lang in zip(lines(text / "train.en"), ["de", "fr"] * 50)]
    (text / "train.en").write_text("".join(f"{line}\n" for line in tagged), encoding="utf-8")
    out = cut(text, tmp_path / "out", "sentencepiece")
    got, steps = lines(out / "train.en"), steps_of(out)
    assert [line.split()[0] for line in got] == ["<2de>", "<2fr>"] * 50
    pieces = {piece for line in got for piece in line.split()[1:]}
    assert len(pieces) <= 30 and not any({*"<2>"} & {*piece} for piece in pieces)
    assert [*map(steps.finish, got)] == [line.strip() for line in tagged]
    (out / "steps.json").unlink()  # as next to a checkpoint of fairseq: models of raw text
    (out / "spm.model").rename(out / "sentencepiece.bpe.model")  # its name in fairseq's hub
    assert find_bundle(str(out / "model.pt")).tokenizer == "none"
    assert find_bundle(str(out / "model.pt"), tokenizer="moses").tokenizer == "moses"
    (out / "bad.model").write_text("no model")
    with pytest.raises(UsageError, match="bad.model: not a valid SentencePiece model"):
        TextSteps("src", "tgt", str(out / "bad.model"), "none")


def test_chinese_is_cut_into_words(tmp_path):
    pairs = [("我们今天在北京大学看见老房子。", "today we see the old house in Peking ."), ("好的", "fine")] * 3
    (tmp_path / "given").mkdir()
    for name in ("train", "valid", "test"):
        for lang, side in zip(("zh", "en"), zip(*pairs)):
            (tmp_path / f"given/{name}.{lang}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    out = cut(tmp_path / "given", tmp_path / "out", "per-side", 500, langs=("zh", "en"))
    first = lines(out / "train.zh")[0]
    assert {"我们", "今天", "北京大学", "看见"} <= {*first.split()} and first.replace(" ", "") == pairs[0][0]
    assert TextSteps("zh", "en", str(out / "code"), "moses").prepare(pairs[0][0]) == first


@pytest.mark.parametrize("bpe", ["joint", "per-side"])
def test_merges_require_words(bpe, tmp_path):
    write_pairs(tmp_path / "given", train=[("a b c", "u v w")] * 20, valid=[("a", "u")], test=[("a", "u")])
    with pytest.raises(UsageError, match="are single characters, which have no"):
        cut(tmp_path / "given", tmp_path / "out", bpe)
    assert not (tmp_path / "out").exists()


KINDS = ["The old house, isn't it? (e-mail: a@b.c) \u201cquoted\u201d", "  blanks\t and\u00a0more  ", "ÄÖÜ ß İ",
         "<2de> A tag before it.", "<2de>glued", "&amp; <b> | [x] 'y'", "1,000.5 % \u2026 \u2014 -",
         "\U0001f600 a\u200bb"]  # fmt: skip


@pytest.mark.parametrize("bpe", ["joint", "per-side", "sentencepiece"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_translate_prepares_text_as_the_recipe_does(text, tmp_path, bpe, lowercase):
    """Lines of every kind are the same units in both."""
    for line in KINDS:
        append(text, "test", line, line)
    out = cut(text, tmp_path / "out", bpe, lowercase=lowercase)
    assert [*map(steps_of(out).prepare, lines(text / "test.en"))] == lines(out / "test.en")
    assert lowercase == (lines(out / "test.en") == lines(cut(text, tmp_path / "low", bpe, lowercase=True) / "test.en"))


def kill_the_third(numbers):
    if 3 in numbers:
        os.kill(os.getpid(), signal.SIGKILL)
    return numbers


def test_a_killed_worker_ends_the_preparation(monkeypatch):
    monkeypatch.setattr(subwords, "BLOCK", 1)
    with pytest.raises(UsageError, match="possibly for lack of memory: use fewer --workers than 2"):
        list(subwords.spread(kill_the_third, range(20), 2))


def state_of_a_worker(_):
    return os.getppid(), signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)


def test_a_worker_ends_when_its_pool_does(monkeypatch):
    """The driver's own handler of SIGTERM, which a fork inherits, would keep it; then the pool waits for ever."""
    started = multiprocessing.get_context("forkserver")  # the default of Python 3.14
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", started)
    monkeypatch.setattr(subwords, "BLOCK", 1)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        found = list(subwords.spread(state_of_a_worker, range(2), 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [(os.getpid(), set(), signal.SIG_DFL)] * 2 and signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
