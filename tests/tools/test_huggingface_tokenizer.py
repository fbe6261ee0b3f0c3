"""The tokenizer files of an export for transformers give fairseq's indices."""

import functools
import importlib.util
import random
import runpy
import unicodedata

import pytest

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import text
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.engines.transformers_engine import TokenizerDictionary
from fairseq_deep.tools import huggingface_import, huggingface_tokenizer
from tests.helpers.exports import dictionary_of, learn_merges, learn_pieces
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, ("sentencepiece", "transformers"))),
                                reason="needs sentencepiece and transformers")  # fmt: skip
PAD, UNK = 1, 3
TAGS = ["<2de>", "<2zh>"]
SCRIPTS = ("abcdefghijklmnop", "äöüßéñ", "абвгд", "αβγ", "漢字仮名", "0123456789", "@&;#'-.,!?", "😀🎉", "e\u0301",
           "אבג", "ქართ", "हिन्दी")  # fmt: skip


def tokenised_lines(count, scripts, seed):
    """Lines of tokenised text: words of one script each, with words that come back often."""
    draws = random.Random(seed)
    letters = [draws.choice(SCRIPTS[:scripts]) for _ in range(60)]
    common = ["".join(draws.choices(script, k=draws.randint(1, 7))) for script in letters]
    lines = []
    for _ in range(count):
        words = draws.choices(common, k=draws.randint(1, 9))
        words += ["".join(draws.choices(draws.choice(SCRIPTS[:scripts]), k=draws.randint(1, 9)))]
        draws.shuffle(words)
        lines.append(" ".join(words))
    return lines


def saved(folder, own, codes):
    """The tokenizer of *own*'s symbols as AutoTokenizer loads it, and the meanings of its ids."""
    from transformers import AutoTokenizer

    huggingface_tokenizer.save_tokenizer(str(folder), own.symbols, str(codes), 200)
    (folder / "config.json").write_text('{"model_type": "m2m_100"}')
    merges = huggingface_tokenizer.read_merges(str(codes))
    more = huggingface_tokenizer.make_vocabulary(own.symbols, merges)[1]
    return AutoTokenizer.from_pretrained(folder, local_files_only=True), [*range(len(own)), *more]


@pytest.mark.parametrize("threshold", [0, 3])
def test_the_tokenizer_is_exact_on_tokenised_text(threshold, tmp_path):
    """Also with scripts that it has never seen, with merges whose parts the dictionary lacks, and behind tags."""
    lines = tokenised_lines(1500, 8, 1)
    learn_merges(tmp_path / "code", lines, 150)
    cut = text.cutter_of(str(tmp_path / "code"))
    own = Dictionary([*TAGS, *dictionary_of(map(cut, lines), threshold).symbols[4:]])
    tokenizer, meanings = saved(tmp_path / "saved", own, tmp_path / "code")
    assert huggingface_import.read_vocabularies(str(tmp_path / "saved")).source[: len(own)] == own.symbols
    assert len(meanings) > len(own) and {*meanings[len(own) :]} == {UNK}
    texts = [*lines, *tokenised_lines(2000, 12, 2), "", "<s> </s> <unk> <pad>", "@@ @@@ a@@ @"]
    texts += [f"{tag} {line}" for tag in TAGS for line in lines[:200]] + ["a <2zh> b", "<2zh>", "  <2de>  ab"]
    rows = tokenizer(texts).input_ids
    prepare = text.tokenizer_of("en", "none")
    assert [[meanings[i] for i in row] for row in rows] == [own.encode(cut(prepare(line))).tolist() for line in texts]
    assert sum(UNK in row for row in rows) > 100
    for line, row in zip(texts, rows):
        if "<2" not in line and all(4 <= index < len(own) for index in row[:-1]):
            assert tokenizer.decode(row[:-1]) == " ".join(line.split())
    assert tokenizer.decode([UNK, own.indices[cut(lines[0]).split()[-1]]]).startswith("<unk> ")
    batch = tokenizer(lines[:3], padding=True)
    assert [row[-1] for row in batch.input_ids].count(PAD) == sum(0 in mask for mask in batch.attention_mask)


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"model_type": "bpe", "byte_fallback": True},
                                     {"model_type": "word", "normalization_rule_name": "identity"}],
                         ids=lambda options: options["model_type"])  # fmt: skip
def test_raw_text_has_the_indices_of_sentencepiece(options, tmp_path):
    """Entries that the dictionary lacks, pieces of unknown characters in it, special symbols in text, and tags."""
    lines = tokenised_lines(1500, 12, 1)
    learn_pieces(tmp_path / "spm.model", [*lines, *["< / s >"] * 60], **options)
    cut = text.cutter_of(str(tmp_path / "spm.model"))
    units = [unit for unit in dictionary_of(map(cut, lines), 2).symbols[4:] if unit != "<unk>"]
    own = Dictionary([*TAGS, ">>fr<<", *units, "madeupword0000"])
    tokenizer, meanings = saved(tmp_path / "saved", own, tmp_path / "spm.model")
    assert len(meanings) == len(own)
    draws = random.Random(3)
    letters = [chr(code) for code in range(33, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    hard = [unicodedata.normalize("NFD", "".join(draws.choices(letters, k=8))) + " ab" for _ in range(300)]
    texts = [*lines, *tokenised_lines(1000, 12, 2), *hard, "<s> </s> <unk> <pad>", "a <2de> b", "<0x41> a"]
    texts = [" ".join(line.split()) for line in texts]
    rows = tokenizer(texts).input_ids
    assert rows == [own.encode(cut(line)).tolist() for line in texts] and sum(UNK in row for row in rows) > 100
    as_engine = TokenizerDictionary(tokenizer)
    assert as_engine.symbols[4:] == TAGS
    for tag, line in zip([*TAGS, ">>fr<<"], texts):
        expected = [own.indices[tag], *own.encode(cut(line)).tolist()]
        assert as_engine.encode(f"{tag} {line}").tolist() == expected
        assert tokenizer(f"{tag.replace('<2', '>>').rstrip('><')}<< {line}").input_ids == expected
    for row in rows:
        if all(4 <= index < len(own) for index in row[:-1]):
            expected = text.joined(" ".join(own.symbols[index] for index in row[:-1]), "sentencepiece")
            assert tokenizer.decode(row[:-1]) == expected


def test_bytes_become_characters():
    example = runpy.run_path(str(ROOT / "examples/translate_pt2.py"))
    for join in (functools.partial(text.joined, kind="sentencepiece"), example["join_pieces"]):
        assert join("\u2581a <0xE6> <0xBC> <0xA2> b <0xFF> \u2581<0x41>") == "a\u6f22b\ufffd <0x41>"
        assert join("\u2581a <0x0D> <0x0A> b") == "a b", "a translation is one line"


def test_vocabularies_without_a_tokenizer_are_refused(tmp_path):
    (tmp_path / "code").write_text("#version: 0.1\na b</w>\n")
    with pytest.raises(UsageError, match="merges of version 0.1; transformers supports only 0.2"):
        huggingface_tokenizer.read_merges(str(tmp_path / "code"))
    with pytest.raises(UsageError, match="merges that form <s>"):
        huggingface_tokenizer.make_vocabulary(["<s>", "<pad>", "</s>", "<unk>", "ab"], [("<", "s>")])


def test_entries_with_two_names_keep_their_index():
    """The unit ``@@@@`` is the beginning ``@@`` of a word, and the whole word ``@@@@``."""
    merges = [("@", "@"), ("@@", "@"), ("@@@", "@</w>")]
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(
        ["<s>", "<pad>", "</s>", "<unk>", "@@@@", "@@"], merges
    )
    assert vocabulary["@@"] == 4 and vocabulary["@@</w>"] == 5
    assert meanings[vocabulary["@@@@</w>"] - 6] == 4 and meanings[vocabulary["@@@"] - 6] == 3


def test_joined_words_of_a_corpus_are_no_tags():
    """Which Moses or jieba would split, too, and which a corpus of another tokenisation has."""
    names = [">>de<<", "__de__", "[de]", "@-@", "&quot;", "--", "\u7814\u7a76\u751f\u547d"]
    assert [name for name in names if huggingface_tokenizer.OTHER_TAG.fullmatch(name)] == names[:3]
