"""fairseq-deep score: each measure against sacreBLEU itself, and tokenised BLEU against its definition."""

import gzip
import io
import json
import math
import sys

import pytest
import sacrebleu

from fairseq_deep.tools import score as tool
from fairseq_deep.tools.generated import best, parse_generated
from fairseq_deep.tools.input_text import read_lines

REFERENCES = [
    "The old man did not see the red-haired girl yesterday, because it was dark.",
    "We will buy three new books tomorrow!",
    "\u00c4pfel, Birnen und \u00d6l: das kostet 3,50 Euro.",
    "A well-known state-of-the-art system was used here.",
]
HYPOTHESES = [
    "The old man has not seen the red-haired girl yesterday, because it was dark.",
    "We will buy three books tomorrow!",
    "\u00c4pfel, Birnen und Oel: das kostet 3,50 Euro.",
    "A well-known state-of-the-art system was used.",
]


@pytest.fixture
def score(command, tmp_path):
    """score(WORD, ...): the printed lines, the record and the warnings of a command that works."""

    def score(*words):
        code, out, errors = command("score", *words, "--json", tmp_path / "out.json")
        assert code == 0, errors
        return out.splitlines(), json.loads((tmp_path / "out.json").read_text()), errors

    return score


@pytest.fixture
def files(tmp_path):
    """Paths of the hypotheses and the references above."""
    return write(tmp_path, sys=HYPOTHESES, ref=REFERENCES)


def write(folder, **texts):
    for name, lines in texts.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(folder / name) for name in texts]


def test_the_default_is_sacrebleu_with_its_signature(files, score):
    lines, result, _ = score("--sys", files[0], "--ref", files[1])
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert lines[-1] == f"BLEU = {expected.score:.2f}"
    assert result["bleu"] == pytest.approx(expected.score, abs=1e-9)
    assert result["precisions"] == pytest.approx(expected.precisions)
    assert (result["hypothesis_length"], result["reference_length"]) == (expected.sys_len, expected.ref_len)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert "case:mixed" in result["signature"] and "tok:13a" in result["signature"]
    assert sacrebleu.__version__ in result["signature"]
    assert any(line.startswith("signature") and result["signature"] in line for line in lines)
    assert (result["sentences"], result["hypotheses"], result["references"]) == (4, *files)


def plain(hypotheses, references):
    """BLEU on white-space tokens, without smoothing, of which another test has the definition."""
    return sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", smooth_method="none", force=True).score


def test_tokenised_and_compound_split_are_plain_bleu_and_labelled(files, score):
    lines, *_ = score("--sys", files[0], "--ref", files[1], "--tokenized")
    assert lines[-1] == f"BLEU = {plain(HYPOTHESES, REFERENCES):.2f}" and "tok:none" in "\n".join(lines)
    assert lines[0].startswith("measure") and "tokenised BLEU" in lines[0]
    lines, *_ = score("--sys", files[0], "--ref", files[1], "--compound-split")
    split = plain(*([tool.split_compounds(line) for line in side] for side in (HYPOTHESES, REFERENCES)))
    assert lines[-1] == f"BLEU = {split:.2f}" and split > plain(HYPOTHESES, REFERENCES) and "inflated" in lines[0]


@pytest.mark.parametrize("lang", ["de", "zh"])
def test_the_language_chooses_the_tokeniser_of_sacrebleu(files, score, lang):
    _, result, _ = score("--sys", files[0], "--ref", files[1], "--lang", lang)
    expected = sacrebleu.BLEU(trg_lang=lang)
    assert result["bleu"] == pytest.approx(expected.corpus_score(HYPOTHESES, [REFERENCES]).score)
    assert ("tok:zh" if lang == "zh" else "tok:13a") in result["signature"]


def test_several_sets_of_references(files, score, tmp_path):
    second = [line.replace("the", "a") for line in HYPOTHESES]
    write(tmp_path, second=second)
    lines, result, _ = score("--sys", files[0], "--ref", files[1], "--ref", tmp_path / "second")
    metrics = sacrebleu.BLEU(), sacrebleu.CHRF()
    expected = [metric.corpus_score(HYPOTHESES, [REFERENCES, second]).score for metric in metrics]
    assert [result["bleu"], result["chrf"]] == pytest.approx(expected) and lines[-1] == f"BLEU = {expected[0]:.2f}"
    assert result["signature"] == str(metrics[0].get_signature()) and "nrefs:2" in result["signature"]
    assert result["chrf_signature"] == str(metrics[1].get_signature())
    assert result["references"] == [files[1], str(tmp_path / "second")]
    one = tool.compute(HYPOTHESES, [REFERENCES], "compound-split")["bleu"]
    assert tool.compute(HYPOTHESES, [REFERENCES, second], "compound-split")["bleu"] > one


# 7 and 4 words; their references have 9, 6, 5, 8 and 8, 7, 6, 9
FOUR_HYPOTHESES = ["The CAT sat on the mat today", "We Agree with them"]
FOUR_REFERENCES = [
    ["yesterday a cat was sitting on the old mat", "we are all in agreement with them now"],
    ["The cat sat on a Mat", "All of us agree with them ."],
    ["cats sit on mats today", "we do agree with those people"],
    ["today the cat is sitting on the mat", "they and we agree on this with each other"],
]


def test_tokenised_bleu_with_four_references_by_hand(tmp_path, score):
    """As multi-bleu.perl -lc: n-grams are clipped by the best reference, and the length is the closest reference's.

    1-grams 7 + 4 of 11. 2-grams without "mat today": 5 + 3 of 9. 3-grams "the cat sat", "cat sat on", "on the mat",
    "agree with them": 4 of 7. 4-grams "the cat sat on": 1 of 5. Closest lengths: 6, as near to 7 as 8 is and shorter;
    and 6, as near to 4 as any gets.
    """
    system, *paths = write(tmp_path, sys=FOUR_HYPOTHESES, **{f"ref{n}": FOUR_REFERENCES[n] for n in range(4)})
    words = ["--sys", system, "--tokenized", *(word for path in paths for word in ("--ref", path))]
    lines, result, _ = score(*words, "--lowercase")
    assert result["precisions"] == pytest.approx([100.0, 100 * 8 / 9, 100 * 4 / 7, 100 * 1 / 5])
    assert (result["hypothesis_length"], result["reference_length"]) == (11, 12)
    expected = 100 * math.exp(1 - 12 / 11) * (8 / 9 * 4 / 7 * 1 / 5) ** 0.25
    assert result["bleu"] == pytest.approx(expected) and lines[-1] == f"BLEU = {expected:.2f}" == "BLEU = 51.55"
    assert all(part in result["signature"] for part in ("nrefs:4", "case:lc", "tok:none", "smooth:none"))
    assert score(*words)[0][-1] == "BLEU = 0.00", "with case no 4-gram is right"


@pytest.mark.parametrize("line, split", [
    ("a-b", "a ##AT##-##AT## b"), ("a-b-c", "a ##AT##-##AT## b-c"),
    ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"), ("a - b -c d-", "a - b -c d-"), ("", ""),
    ("a--b", "a ##AT##-##AT## -b"), ("\u00e4-\u00f6 x", "\u00e4 ##AT##-##AT## \u00f6 x"),
    ("a\u00a0-b", "a\u00a0 ##AT##-##AT## b"),
])  # fmt: skip
def test_compound_split_is_one_pass_without_overlap(line, split):
    assert tool.split_compounds(line) == split


SEPARATED = ["one\u2028two three four five", "six\u0085seven eight nine ten", "", "eleven\x0ctwelve \x1cthirteen"]


@pytest.mark.parametrize("data", [
    "\n".join(SEPARATED).encode(), "".join(f"{line}\n" for line in SEPARATED).encode(),
    b"\xef\xbb\xbf" + "\r\n".join(SEPARATED).encode(), gzip.compress("\n".join(SEPARATED).encode()),
], ids=["no last newline", "newlines", "of Windows", "gzip"])  # fmt: skip
def test_lines_end_at_newlines_alone(tmp_path, score, data, monkeypatch):
    """In a file or on standard input, with a byte order mark, compressed, whatever its name."""
    write(tmp_path, ref=SEPARATED)
    (tmp_path / "sys").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for name in [tmp_path / "sys", *["-"] * (data[:1] != b"\x1f")]:
        lines, result, _ = score("--sys", name, "--ref", tmp_path / "ref")
        assert result["sentences"] == 4 and lines[-1] == "BLEU = 100.00"
    (tmp_path / "odd").write_text("a\u2028b\rc\n\n", newline="")
    assert read_lines(str(tmp_path / "odd")) == ["a\u2028b\rc", ""]


def test_what_looks_wrong_is_warned_about(tmp_path, score):
    """Tokenised text, a few sub-words, texts in another order; but not a line about such marks."""
    text = write(tmp_path, tok=["this is a te@@ st .", *["this is a test ."] * 199])
    errors = score("--sys", *text, "--ref", *text)[2].splitlines()
    assert "1 of 200 lines have sub-word marks" in errors[0] == errors[1]
    assert "200 hypotheses end in ' .'" in errors[2] and "200 references end in ' .'" in errors[3]
    lines = [f"{index} {line}" for index, line in enumerate(REFERENCES * 8)]
    about, ref, shifted = write(tmp_path, about=[*lines, "@@ -1,3 +1,3 @@"], ref=lines, shifted=["x", *lines[:-1]])
    assert score("--sys", about, "--ref", about)[0][-1] == "BLEU = 100.00"
    for systems in ([shifted], [ref, shifted]):
        *_, errors = score("--ref", ref, "--sys", *systems)
        assert errors.count("\n") == 1 and "shifted has a BLEU of 0." in errors
        assert "in the order and the language" in errors


@pytest.mark.parametrize("measure", [[], ["--tokenized"], ["--compound-split"]])
def test_several_systems(measure, files, tmp_path, score):
    """Each score as alone; p as of the pairs with --against."""
    better = write(tmp_path, better=[HYPOTHESES[0], *REFERENCES[1:]])
    words, systems = [*measure, "--ref", files[1]], [files[0], *better, files[1]]
    alone = [score("--sys", path, *words)[0][-1].removeprefix("BLEU = ") for path in systems]
    printed, record, _ = score("--sys", *systems[:2], "--sys", systems[2], *words, "--resamples", 50)
    assert printed[-1] == f"BLEU = {' '.join(alone)}" and alone[0] != alone[1] != alone[2]
    start = next(number for number, line in enumerate(printed, 1) if "95 % interval" in line)
    rows = [line.removeprefix("BLEU").split() for line in printed[start : start + 3]]
    assert [row[:2] for row in rows] == [list(pair) for pair in zip(systems, alone)]
    assert float(rows[1][-2]) == pytest.approx(float(alone[1]) - float(alone[0]), abs=0.011)
    found = record["systems"]
    assert found[0]["BLEU"]["p"] is None and all(0 < each["BLEU"]["p"] <= 1 for each in found[1:])
    if not measure:
        _, record, _ = score("--sys", systems[1], *words, "--against", systems[0], "--resamples", 50)
        pair = record["against"]["measures"]
        assert [found[1][name]["p"] for name in ("BLEU", "chrF")] == [pair[name]["p"] for name in ("BLEU", "chrF")]


def generation(hypothesis, reference="a house is here", decoded=None):
    return f"S-0\tein haus\nT-0\t{reference}\nH-0\t-0.1\t{hypothesis}\nD-0\t-0.1\t{decoded or hypothesis}\n"


def test_chinese_words_may_be_joined_by_the_tokenizer(tmp_path, score):
    """Moses joins them in D- lines, as a second decoding of SentencePiece would; the language is --detokenize's."""
    words = "\u6211 \u4eec \u53bb \u54ea \u91cc"
    (tmp_path / "gen").write_text(generation(words, *[words.replace(" ", "")] * 2), encoding="utf-8")
    assert score("--generate-output", tmp_path / "gen", "--detokenize", "zh_CN")[0][-1] == "BLEU = 100.00"


GENERATED = [
    "H\u00e4ngende Warnung: H-1 ist keine Zeile", "/env/hydra/compose.py:56: UserWarning:",
    "Hydra 1.3 changes the default", "H-bad\tnot one", "S-10\tzehn", "T-10\tten &apos;s a lot , really .",
    "H-10\t-0.5\tten &apos;s a lot , really .", "D-10\t-0.5\tten &apos;s a lot , really .", "P-10\t-0.1 -0.2",
    "T-2\ttwo words here now", "H-2\t-0.9\t", "D-2\t-0.9\t", "T-0\tone more line here", "H-0\t-0.7\tsecond best",
    "H-0\t-0.2\tone more line here", "H-0\t-1.5\tlast",
    *(line for i in (1, 3, 4, 5, 6, 7, 8, 9) for line in (f"T-{i}\tword {i} is here", f"H-{i}\t-1\tword {i} is here")),
    "2020-01-01 | INFO | fairseq_cli.generate | NOTE: hypothesis and token scores are output in base 2",
    "Generate test with beam=4: BLEU4 = 99.00",
]  # fmt: skip


@pytest.fixture
def generated(tmp_path):
    """Path of an output of fairseq-generate: 11 sentences in the order of batches, hypotheses in any, between noise."""
    return write(tmp_path, gen=GENERATED)[0]


def test_generated_lines_are_ordered_by_number(generated, tmp_path, score):
    outputs = ("--hypotheses", tmp_path / "hyp", "--references", tmp_path / "ref")
    printed, *_ = score("--generate-output", generated, "--tokenized", *outputs)
    hypotheses, references = ((tmp_path / name).read_text().split("\n")[:-1] for name in ("hyp", "ref"))
    assert hypotheses[:4] == ["one more line here", "word 1 is here", "", "word 3 is here"]
    assert hypotheses[10] == "ten &apos;s a lot , really ." and len(hypotheses) == len(references) == 11
    assert references[2] == "two words here now"
    assert printed[-1] == f"BLEU = {plain(hypotheses, references):.2f}"
    assert score("--sys", tmp_path / "hyp", "--ref", tmp_path / "ref", "--tokenized")[0] == printed
    assert score("--generate-output", generated, generated, "--tokenized")[0][-1] == f"{printed[-1]} {printed[-1][7:]}"
    score("--generate-output", generated, "--detokenize", "en", *outputs)
    for name in ("hyp", "ref"):
        assert (tmp_path / name).read_text().split("\n")[10] == "ten's a lot, really."


def test_a_decoded_line_beats_the_raw_one_and_an_empty_one_may_lack_its_tab():
    lines = ["T-0\tI'm here.", "H-0\t-1\tI &apos;m h@@ ere .", "D-0\t-1\tI'm here."]
    kinds = parse_generated(lines, "out")[0]
    assert best(kinds) == kinds["T"] == "I'm here." and kinds["H"] == "I &apos;m h@@ ere ."
    assert parse_generated(["T-0", "H-0\t-1.5"], "out") == {0: {"T": "", "H": ""}}


def test_references_of_a_generation_may_come_from_files_and_are_written_one_by_one(generated, tmp_path, score):
    words = ["--generate-output", generated]
    for number in (0, 1):
        write(tmp_path, **{f"raw{number}": [f"word {i} is {number}" for i in range(11)]})
        words += ["--ref", tmp_path / f"raw{number}", "--references", tmp_path / f"ref{number}"]
    assert "nrefs:2" in score(*words)[1]["signature"]
    for number in (0, 1):
        assert (tmp_path / f"ref{number}").read_text() == (tmp_path / f"raw{number}").read_text()


def test_an_incomplete_generation_is_warned_about(tmp_path, score):
    path = write(tmp_path, gen=["T-0\ta b c d", "H-0\t-1\ta b c d", "T-2\te f g h", "H-2\t-1\te f g h"])
    assert "2 sentences of at least 3 (first missing: 1)" in score("--generate-output", *path)[2]


def test_a_tokeniser_that_is_not_installed_is_named(files, command, monkeypatch):
    from sacrebleu import metrics

    def refuse(**options):
        raise RuntimeError("\nJapanese tokenization requires\nextra dependencies\n")

    monkeypatch.setattr(metrics, "BLEU", refuse)
    code, _, error = command("score", "--sys", files[0], "--ref", files[1], "--lang", "ja")
    assert code == 2 and error.count("\n") == 1
    assert "sacreBLEU requires a tokenizer for 'ja': pip install 'sacrebleu[ja]'" in error
