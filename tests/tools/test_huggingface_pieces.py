"""Exports of SentencePiece for transformers cut raw text as SentencePiece does; target language tags stay whole."""

import random
import unicodedata

import pytest

from fairseq_deep import cli
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import text
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.tools import huggingface_export, huggingface_import, huggingface_pieces, huggingface_tokenizer
from tests.helpers.exports import dictionary_of, learn_merges, learn_pieces, tokenised_lines, write_model

spm = pytest.importorskip("sentencepiece")
pytest.importorskip("transformers")
pytest.importorskip("google.protobuf")
TAGS = ["<2de>", "<2zh>"]
SPECIAL = [
    "<s> </s> <unk> <pad>", "a <2de> b", "<2de> ab", "  <2zh>   ab ", "<2de>", "<0x41> a", "madeupword0000", "<<a>>",
    "\uff5e ~", "\uff8a\uff9f\uff76\uff9e", "\u200b", "a\u200bb", "\u3000", "\u00bd \ufb01 \u2122", "\u0149\u032d",
    "\u0301a", "\x7f\u0315 \u2029b", "\u0644\u0651\u064e", "o\u0302\u0303O\u0302\u0301",
]  # fmt: skip


def hard_lines(count):
    """Characters from everywhere, and those that consist of several: accents of Vietnamese, Korean syllables."""
    draws = random.Random(3)
    letters = [chr(code) for code in range(1, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    several = [letter for letter in letters if len(unicodedata.normalize("NFD", letter)) > 2]
    pools = letters, [letter for letter in letters if ord(letter) < 0x3400], several
    lines = ["".join(draws.choices(draws.choice(pools), k=8)) + " ab" for _ in range(count)]
    return [unicodedata.normalize(draws.choice(["NFC", "NFD"]), line) for line in lines]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_raw_text_has_the_indices_of_sentencepiece(options, tmp_path):
    """Entries that the dictionary lacks, pieces of unknown characters in it, byte fallback, and text of any script."""
    lines = tokenised_lines(1500, 12, 1)
    pieces = learn_pieces(tmp_path / "spm.model", [*lines, *["< / s >"] * 60], **options)
    cut = text.cutter_of(str(tmp_path / "spm.model"))
    units = [unit for unit in dictionary_of(map(cut, lines), 2).symbols[4:] if unit != "<unk>"]
    own = Dictionary([*TAGS, *units, "madeupword0000"])
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(own.symbols, pieces)
    made = huggingface_tokenizer.make_tokenizer(vocabulary, pieces, 500, TAGS)
    huggingface_tokenizer.save_tokenizer(made, tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text('{"model_type": "m2m_100"}')
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    texts = [*lines, *tokenised_lines(1000, 12, 2), *hard_lines(1500), *SPECIAL]
    prepare = text.tokenizer_of("en", "none")
    raw = lambda line: cut(prepare(line))  # noqa: E731
    rows, ties = huggingface_export.encode(tokenizer, texts, raw, own, meanings, pieces.unigram)
    assert ties <= (10 if pieces.unigram else 0)
    assert sum(own.unk in row or max(row) >= len(own) for row in rows) > 100
    assert any(huggingface_pieces.START in name for name in vocabulary) != bool(pieces.bytes)
    tagged = rows[len(texts) - len(SPECIAL) :][2]
    assert tagged[0] == own.indices["<2de>"] and tagged[1:] == tokenizer("ab").input_ids
    for row in rows:
        if not ties and all(4 <= index < len(own) for index in row[:-1]):
            expected = text.joined(" ".join(own.symbols[index] for index in row[:-1]), "sentencepiece")
            assert tokenizer.decode(row[:-1]) == expected


def test_bytes_become_characters():
    units = "\u2581a <0xE6> <0xBC> <0xA2> b <0xFF> \u2581<0x41>"
    assert text.joined(units, "sentencepiece") == "a\u6f22b\ufffd <0x41>"
    assert text.joined("\u2581a <0x0D> <0x0A> b", "sentencepiece") == "a b", "a translation is one line"


def test_tags_stay_whole_beside_merges(tmp_path):
    lines = tokenised_lines(300, 3, 1)
    cut = learn_merges(tmp_path / "code", lines, 60)
    own = Dictionary([*TAGS, *dictionary_of(map(cut, lines)).symbols[4:]])
    merges = huggingface_tokenizer.read_subwords(str(tmp_path / "code"))
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(own.symbols, merges)
    tokenizer = huggingface_tokenizer.make_tokenizer(vocabulary, merges, 200, TAGS)
    texts = [f"{tag} {line}" for tag in TAGS for line in lines] + ["a <2de> b", "<2zh>", "  <2de>  ab"]
    prepare, whole = text.tokenizer_of("en", "none"), text.cutter_of(str(tmp_path / "code"))
    rows, _ = huggingface_export.encode(tokenizer, texts, lambda line: whole(prepare(line)), own, meanings)
    huggingface_tokenizer.save_tokenizer(tokenizer, tmp_path / "saved")
    found = huggingface_import.read_vocabularies(str(tmp_path / "saved")).source
    assert found[: len(own)] == own.symbols
    assert [rows[0][0], rows[300][0]] == [own.indices[tag] for tag in TAGS] and rows[-3][0] != own.indices["<2de>"]


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"model_type": "word", "vocab_size": 100}, "has words or characters as pieces"),
        ({"user_defined_symbols": ["<2de>"]}, "has pieces that the user has defined"),
        ({"treat_whitespace_as_suffix": True}, "has blanks at the end of pieces"),
    ],
)
def test_models_without_a_tokenizer_are_refused(options, problem, tmp_path):
    with pytest.raises(UsageError, match=f"{problem}, which the export does not support: use 'fairseq-deep package'"):
        learn_pieces(tmp_path / "spm.model", tokenised_lines(300, 3, 1), **options)


def test_only_orders_of_the_same_pieces_count_as_ties():
    class Reversed:
        def __call__(self, texts):
            self.input_ids = [[5, 4, 2] for _ in texts]
            return self

    own = Dictionary(["a", "b"])
    assert huggingface_export.encode(Reversed(), ["a b"], None, own, [], True) == ([[5, 4, 2]], 1)
    for line, unigram in (("a b", False), ("a a", True)):
        with pytest.raises(UsageError, match="splits a sentence differently"):
            huggingface_export.encode(Reversed(), [line], None, own, [], unigram)


def test_a_multilingual_model_is_exported_with_its_tags(tmp_path, capsys):
    """The class with its table, and the card, from raw text with a tag to raw text."""
    lines = tokenised_lines(400, 4, 1)
    learn_pieces(tmp_path / "spm.model", lines, vocab_size=120)
    cut = text.cutter_of(str(tmp_path / "spm.model"))
    units = dictionary_of([*TAGS, *map(cut, lines)])
    write_model(tmp_path, "prenorm_6l", (units, units), share_all_embeddings=True)
    words = ["--format", "huggingface", "--tokenizer", "none", "--bpe-codes", tmp_path / "spm.model"]
    code = cli.main(["export", *map(str, [tmp_path / "model.pt", *words, "--output", tmp_path / "out"])])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    assert " 16 sentences within " in out and "(random units, " in out
    card = (tmp_path / "out/README.md").read_text()
    assert "Begin each line with the tag of its target language and a blank: `<2de>`, `<2zh>`." in card
    assert "The tokenizer expects raw text." in card and "sacremoses" not in card.partition("## Use")[2]
    names = {}
    exec(card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path / "out")), names)
    own = Dictionary.load(str(tmp_path / "dict.src.txt"))
    given = [f"{TAGS[number % 2]} {line}" for number, line in enumerate(lines[:20])]
    assert names["tokenizer"](given).input_ids == [own.encode(cut(line)).tolist() for line in given]
    assert len(names["translate"](given[:2])) == 2
