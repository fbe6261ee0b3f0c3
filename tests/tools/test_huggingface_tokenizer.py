"""The tokenizer files of an export for transformers give fairseq's indices."""

import importlib.util

import pytest

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.tools import huggingface_export, huggingface_tokenizer
from tests.helpers.exports import dictionary_of, learn_merges, tokenised_lines

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
PAD = 1


@pytest.mark.parametrize("threshold", [0, 3])
def test_the_tokenizer_is_exact_on_tokenised_text(threshold, tmp_path):
    """Also with scripts that it has never seen, and with merges whose parts the dictionary lacks."""
    lines = tokenised_lines(1500, 8, 1)
    cut = learn_merges(tmp_path / "code", lines, 150)
    dictionary = dictionary_of(map(cut, lines), threshold)
    own = Dictionary(dictionary.symbols[4:])
    merges = huggingface_tokenizer.read_subwords(str(tmp_path / "code"))
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(own.symbols, merges)
    assert meanings and set(meanings) == {3}
    tokenizer = huggingface_tokenizer.make_tokenizer(vocabulary, merges, 200)
    huggingface_tokenizer.save_tokenizer(tokenizer, tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text('{"model_type": "m2m_100"}')
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    texts = [*lines, *tokenised_lines(2000, 12, 2), "", "<s> </s> <unk> <pad>", "@@ @@@ a@@ @"]
    rows, ties = huggingface_export.encode(tokenizer, texts, cut, own, meanings)
    assert len(rows) == len(texts) and not ties and sum(3 in row for row in rows) > 100
    for text, row in zip(texts, rows):
        if all(4 <= index < len(own) for index in row[:-1]):
            assert tokenizer.decode(row[:-1]) == " ".join(text.split())
    assert tokenizer.decode([3, own.indices[cut(lines[0]).split()[-1]]]).startswith("<unk> ")
    batch = tokenizer(lines[:3], padding=True)
    assert [row[-1] for row in batch.input_ids].count(PAD) == sum(0 in mask for mask in batch.attention_mask)
    with pytest.raises(UsageError, match="splits a sentence differently"):
        huggingface_export.encode(tokenizer, lines[:20], lambda line: line, own, meanings)


@pytest.mark.parametrize("problem", ["version 0.1", "a special symbol", "twice"])
def test_vocabularies_without_a_tokenizer_are_refused(problem, tmp_path):
    (tmp_path / "code").write_text(f"#version: {problem[-3:] if problem.startswith('version') else '0.2'}\na b</w>\n")
    merges = [("<", "s>")] if problem == "a special symbol" else [("a", "b</w>")]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "ab"]
    messages = {
        "version 0.1": "merges of version 0.1; transformers supports only 0.2",
        "a special symbol": "merges that form <s>",
        "twice": "'ab' occurs",
    }
    with pytest.raises(UsageError, match=messages[problem]):
        if problem == "version 0.1":
            huggingface_tokenizer.read_subwords(str(tmp_path / "code"))
        huggingface_tokenizer.make_vocabulary(symbols + ["ab"] * (problem == "twice"), merges)


def test_entries_with_two_names_keep_their_index():
    """The unit ``@@@@`` is the beginning ``@@`` of a word, and the whole word ``@@@@``."""
    merges = [("@", "@"), ("@@", "@"), ("@@@", "@</w>")]
    vocabulary, meanings = huggingface_tokenizer.make_vocabulary(
        ["<s>", "<pad>", "</s>", "<unk>", "@@@@", "@@"], merges
    )
    assert vocabulary["@@"] == 4 and vocabulary["@@</w>"] == 5
    assert meanings[vocabulary["@@@@</w>"] - 6] == 4 and meanings[vocabulary["@@@"] - 6] == 3
