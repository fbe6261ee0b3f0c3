"""Sub-words of the recipes: joint, per side, SentencePiece; Chinese; what is dropped; several test sets."""

import multiprocessing
import os
import random
import signal

import pytest
from subword_nmt.apply_bpe import BPE

from fairseq_deep.core.registry import UsageError
from fairseq_deep.recipes.text import subwords
from fairseq_deep.runtime import TextSteps, find_bundle
from tests.helpers.recipes import assert_refused, lines, program, write_pairs

LETTERS = {"en": "abcdefg", "de": "uvwxyzä", "zh": "我们看见老房子"}


def word(lang, rng):
    return "".join(rng.choice(LETTERS[lang]) for _ in range(rng.randint(2, 5)))


@pytest.fixture
def text(tmp_path):
    """Sentences of two alphabets; the ninth pair is longer than the others."""
    rng, folder = random.Random(3), tmp_path / "text"
    pairs = [tuple(" ".join(word(lang, rng) for _ in range(3)) for lang in ("en", "de")) for _ in range(120)]
    pairs[8] = tuple(" ".join([side] * 4) for side in pairs[8])
    write_pairs(folder, train=pairs[:100], valid=pairs[100:110], test=pairs[110:115], test1=pairs[115:120])
    return folder


def cut(text, out, *words, **how):
    return program("subwords", "--text", text, "--out", out, "--merges", "30", "--max-words", "50", *words, **how)


def merges(path):
    with open(path, encoding="utf-8") as stream:
        return BPE(stream)


def test_each_side_has_merges_of_its_own(text, tmp_path):
    done = cut(text, tmp_path / "out", "--bpe", "per-side")
    assert done.returncode == 0, done.stderr
    learned = {lang: set("".join(lines(tmp_path / "out" / name)[1:]).replace("</w>", "").replace(" ", ""))
               for lang, name in (("en", "code"), ("de", "code.de"))}  # fmt: skip
    assert all(letters <= set(LETTERS[lang]) for lang, letters in learned.items())
    for lang, name in (("en", "code"), ("de", "code.de")):
        for split in ("train", "test", "test1"):
            expected = [merges(tmp_path / "out" / name).process_line(line) for line in lines(text / f"{split}.{lang}")]
            assert lines(tmp_path / f"out/{split}.{lang}") == expected
    bundle = find_bundle(str(checkpoint(tmp_path / "out")))
    steps = TextSteps("en", "de", bundle.codes, bundle.tokenizer)
    assert steps.prepare(lines(text / "test.en")[0]) == lines(tmp_path / "out/test.en")[0]


def test_references_are_tokenised(text, tmp_path):
    (text / "test.de.ref1").write_text("Das, Haus.\n" * 5)
    done = cut(text, tmp_path / "out", "--lowercase", "true", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "out/test.de.ref1.tok") == ["das , haus ."] * 5
    assert lines(tmp_path / "out/test.de.tok") == lines(text / "test.de"), "these are lower-cased words already"
    assert len(list((tmp_path / "out").glob("*.tok*"))) == 4, "all references of valid, test and test1"


def checkpoint(folder):
    (folder / "model.pt").touch()
    return folder / "model.pt"


def test_pairs_with_many_sub_words_are_dropped(text, tmp_path):
    whole, short = tmp_path / "whole", tmp_path / "short"
    assert cut(text, whole).returncode == 0
    pairs = list(zip(lines(whole / "train.en"), lines(whole / "train.de")))
    limit = max(len(side.split()) for pair in pairs[:8] + pairs[9:] for side in pair)
    done = cut(text, short, "--max-subwords", limit)
    assert done.returncode == 0 and f"1 training pairs dropped: over {limit} sub-words" in done.stdout, done.stderr
    assert list(zip(lines(short / "train.en"), lines(short / "train.de"))) == pairs[:8] + pairs[9:]
    assert lines(short / "test1.de") == lines(whole / "test1.de") and not list(short.glob("*.short"))
    assert_refused(cut(text, short, "--max-subwords", "2"), "no training pair has 1 to 2 sub-words")


def test_pieces_of_the_text_as_it_is_behind_the_tag_of_a_language(text, tmp_path):
    """The tag is one word and no text to learn from; joined pieces are the text again."""
    path = text / "train.en"
    tagged = [f"<2{lang}> {line}" for line, lang in zip(lines(path), ["de", "fr"] * 50)]
    path.write_text("".join(f"{line}\n" for line in tagged), encoding="utf-8")
    done = cut(text, tmp_path / "out", "--bpe", "sentencepiece")
    assert done.returncode == 0, done.stderr
    got = lines(tmp_path / "out/train.en")
    assert [line.split()[0] for line in got] == ["<2de>", "<2fr>"] * 50
    assert ["".join(line.split()[1:]).replace("▁", " ").strip() for line in got] == [line[6:] for line in tagged]
    vocabulary = {piece for line in got for piece in line.split()[1:]}
    assert len(vocabulary) <= 30 and not any(set("<2>") & set(piece) for piece in vocabulary)
    bundle = find_bundle(str(checkpoint(tmp_path / "out")))
    steps = TextSteps("src", "tgt", bundle.codes, bundle.tokenizer)
    assert bundle.tokenizer == "none" and [steps.prepare(line) for line in tagged] == got
    assert [steps.finish(line) for line in got] == [line.strip() for line in tagged]
    (tmp_path / "out/steps.json").unlink()  # as next to a checkpoint of fairseq: models of raw text
    assert find_bundle(bundle.checkpoint).tokenizer == "none"
    assert find_bundle(bundle.checkpoint, tokenizer="moses").tokenizer == "moses"
    (tmp_path / "bad.model").write_text("no model")
    with pytest.raises(UsageError, match="bad.model: not a valid SentencePiece model"):
        TextSteps("src", "tgt", str(tmp_path / "bad.model"), "none")


def test_chinese_is_cut_into_words(tmp_path):
    text = tmp_path / "text"
    pairs = [("我们今天在北京大学看见老房子。", "today we see the old house in Peking ."), ("好的", "fine")] * 3
    for split in ("train", "valid", "test"):
        for lang, side in zip(("zh", "en"), zip(*pairs)):
            text.mkdir(exist_ok=True)
            (text / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    done = cut(text, tmp_path / "out", "--bpe", "per-side", "--merges", "500", langs=("zh", "en"))
    assert done.returncode == 0, done.stderr
    first = lines(tmp_path / "out/train.zh")[0]
    assert {"我们", "今天", "北京大学", "看见"} <= set(first.split()) and first.replace(" ", "") == pairs[0][0]
    steps = TextSteps("zh", "en", str(tmp_path / "out/code"), "moses")
    assert steps.prepare(pairs[0][0]) == first


def test_merges_require_words(tmp_path):
    write_pairs(tmp_path / "text", train=[("a b c", "u v w")] * 20, valid=[("a", "u")], test=[("a", "u")])
    for bpe in ("joint", "per-side"):
        assert_refused(cut(tmp_path / "text", tmp_path / "out", "--bpe", bpe), "are single characters, which have no")
    assert not (tmp_path / "out").exists()


def test_a_gap_between_test_sets_is_refused(text, tmp_path):
    for lang in ("en", "de"):
        (text / f"test1.{lang}").rename(text / f"test3.{lang}")
    assert_refused(cut(text, tmp_path / "out"), "test3.en after a gap")


KINDS = ["The old house, isn't it? (e-mail: a@b.c) \u201cquoted\u201d", "  blanks\t and\u00a0more  ", "ÄÖÜ ß İ",
         "<2de> A tag before it.", "<2de>glued", "&amp; <b> | [x] 'y'", "1,000.5 % \u2026 \u2014 -",
         "\U0001f600 a\u200bb"]  # fmt: skip


@pytest.mark.parametrize("bpe", ["joint", "per-side", "sentencepiece"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_translate_prepares_text_as_the_recipe_does(text, tmp_path, bpe, lowercase):
    """The same function: lines of every kind are the same units in both."""
    if bpe == "sentencepiece":
        pytest.importorskip("sentencepiece")
    for lang in ("en", "de"):
        content = (text / f"test.{lang}").read_text(encoding="utf-8")
        (text / f"test.{lang}").write_text(content + "".join(f"{line}\n" for line in KINDS), encoding="utf-8")
    done = cut(text, tmp_path / "out", "--bpe", bpe, "--lowercase", str(lowercase).lower())
    assert done.returncode == 0, done.stderr
    bundle = find_bundle(str(checkpoint(tmp_path / "out")))
    assert bundle.lowercase == lowercase
    steps = TextSteps("en", "de", bundle.codes, bundle.tokenizer, bundle.lowercase)
    assert list(map(steps.prepare, lines(text / "test.en"))) == lines(tmp_path / "out/test.en")


def kill_the_third(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_worker_ends_the_preparation():
    with pytest.raises(UsageError, match="possibly for lack of memory: use fewer --workers than 2"):
        list(subwords.spread(kill_the_third, [(number,) for number in range(20)], 2))


def signals_of_a_worker(_):
    return signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)


def test_a_worker_ends_when_its_pool_does(monkeypatch):
    """The driver's own handler of SIGTERM, which a fork inherits, would keep it; then the pool waits for ever."""
    started = multiprocessing.get_context("forkserver")  # the default of Python 3.14
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", started)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        found = list(subwords.spread(signals_of_a_worker, [(0,), (1,)], 2))
        assert list(subwords.spread(os.getppid, [()], 2)) == [os.getpid()]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [(set(), signal.SIG_DFL)] * 2 and signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
