"""Text files: only LF ends a line, a byte order mark is no word, and both sides have the same number of sentences."""

import io
import sys

import pytest
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import IndexedRawTextDataset
from fairseq_cli import interactive, score

from fairseq_deep.runtime.dictionary import Dictionary as OwnDictionary
from tests.helpers.commands import run

ODD = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\u00a0\u3000"
FORMS = ("{0} {1} b", "{1} {0} b", "{1}{0}b", "{1} b {0}", "{0}{1} b{0}{0}", "{1} b\r")


def write_odd(folder):
    """Write pairs that have each odd character in each place, on both sides, and return their sources' tokens."""
    sources = [form.format(char, f"n{number}") for number, char in enumerate(ODD) for form in FORMS]
    sources += [*ODD, "", "the end\r"]
    targets = [*sources[1:], sources[0]]
    for language, side in (("src", sources), ("tgt", targets)):
        (folder / f"train.{language}").write_bytes(("\ufeff" + "\n".join(side)).encode())
    return [line.split() for line in sources]


@pytest.mark.parametrize("workers", [1, 3])
def test_no_pair_is_shifted(tmp_path, workers):
    expected = write_odd(tmp_path)
    flags = ["-s", "src", "-t", "tgt", "--trainpref", tmp_path / "train", "--joined-dictionary", "--workers", workers]
    run("fairseq-preprocess", *flags, "--destdir", tmp_path / "bin")
    dictionary = Dictionary.load(str(tmp_path / "bin/dict.src.txt"))
    sources, targets = (
        [dictionary.string(tokens).split() for tokens in data_utils.load_indexed_dataset(str(path), dictionary)]
        for path in (tmp_path / "bin/train.src-tgt.src", tmp_path / "bin/train.src-tgt.tgt")
    )
    assert sources == expected
    assert targets == [*expected[1:], expected[0]]


def test_all_readers_see_the_same_lines(tmp_path, monkeypatch):
    expected, path = write_odd(tmp_path), str(tmp_path / "train.src")
    assert [line.split() for lines in interactive.buffered_read(path, 5) for line in lines] == expected
    with open(path, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert [line.split() for lines in interactive.buffered_read("-", 100) for line in lines] == expected
    assert [line.split() for line in IndexedRawTextDataset(path, Dictionary()).lines] == expected


def test_a_dictionary_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "dict.txt").write_bytes("\ufeffa 2\r\nb\rc 1\r\nd 1\n".encode())
    found = Dictionary.load(str(tmp_path / "dict.txt")).symbols
    assert found[4:] == ["a", "b\rc", "d"] and OwnDictionary.load(str(tmp_path / "dict.txt")).symbols[4:] == found[4:]


def test_tables_of_words(tmp_path):
    (tmp_path / "words").write_bytes("\ufeffa\x85 b\r\nc d\n".encode())
    assert utils.load_align_dict(str(tmp_path / "words")) == {"a": "b", "c": "d"}
    (tmp_path / "vectors").write_bytes("2 1\nb\r 0.5\na\u2028 1.5\r\n".encode())
    assert list(utils.parse_embedding(str(tmp_path / "vectors"))) == ["b\r", "a\u2028"]


@pytest.mark.parametrize("kind", [[], ["--sacrebleu"], ["--sentence-bleu"]])
def test_score_compares_the_same_lines(tmp_path, monkeypatch, capsys, kind):
    (tmp_path / "hypotheses").write_bytes(b"a b\rc d e\r\nf g h i j\n")
    (tmp_path / "references").write_bytes("\ufeffA b c d e\nf g h i j".encode())
    flags = ["-s", tmp_path / "hypotheses", "-r", tmp_path / "references", *kind, "--ignore-case"]
    monkeypatch.setattr(sys, "argv", ["fairseq-score", *map(str, flags)])
    score.cli_main()
    assert "= 100.0" in capsys.readouterr().out
    with open(tmp_path / "references", "a") as stream:
        stream.write("\none more")
    with pytest.raises(SystemExit, match="the numbers of sentences must be equal .2 and 3.; "):
        score.cli_main()


def test_standard_input_is_read_as_bytes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffä\rb\n".encode()), encoding="ascii"))
    assert list(interactive.buffered_read("-", 1)) == [["ä\rb"]]
