"""Text before the model."""

import pytest
from subword_nmt import apply_bpe

from fairseq_deep.runtime import text


def test_the_cache_of_sub_words_is_bounded(tmp_path, monkeypatch):
    """A server sees words without end; what is cut does not depend on what was cut before."""
    made = []

    class Kept(apply_bpe.BPE):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(apply_bpe, "BPE", Kept)
    (tmp_path / "code").write_text("#version: 0.2\na b\nab c</w>\n")
    lines = [f"abc ab{'x' * (number % 7)} {number}" for number in range(200)]
    cut = text.cutter_of(str(tmp_path / "code"))
    want = [cut(line) for line in lines]
    assert want[1] == "abc ab@@ x 1" and len(made[0].cache) > 150
    monkeypatch.setattr(text, "CACHED", 100)
    bounded, largest = text.cutter_of(str(tmp_path / "code")), 0
    for line, found in zip(lines, want):
        assert bounded(line) == found
        largest = max(largest, len(made[1].cache))
    assert 0 < largest < 50


@pytest.mark.parametrize("lowercase", [False, True])
def test_a_language_tag_stays_whole(lowercase):
    prepare = text.tokenizer_of("en", "moses", lowercase)
    assert prepare("<2zh_CN> Don't <2de>") == "<2zh_CN> " + prepare("Don't <2de>") != prepare("Don't <2de>")
    assert prepare("<2de>") == prepare("<2de> ") == "<2de>" and prepare(" <2de>").startswith("&lt;")
    known = text.tokenizer_of("en", "moses", lowercase, {"<2de>"})
    assert known("<2de> a") == "<2de> a" and known("<24> degrees") == "&lt; 24 &gt; degrees"
    assert prepare("<2a>" * 5000).startswith("<2a> &lt;"), "only the first one is a tag"


def test_symbols_of_sub_words():
    parts = {symbol: text.is_part(symbol) for symbol in ("ab@@", "\u2581ab", "\u2581", "ab", "@")}
    assert [symbol for symbol, found in parts.items() if found] == ["ab@@", "\u2581ab"]
