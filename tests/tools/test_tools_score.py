"""fairseq-deep score: each measure against sacreBLEU itself, or against BLEU written from its definition."""

import gzip
import io
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import sacrebleu

from fairseq_deep.tools import read_lines
from fairseq_deep.tools import score as tool
from fairseq_deep.tools.generated import best, parse_generated
from fairseq_deep.tools.main import main
from tests.helpers import commands
from tests.helpers.tools import failing

fails = failing("score")

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


def naive_bleu(hypotheses, references):
    """BLEU-4 of Papineni et al. (2002) on white-space tokens, without smoothing."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(hypotheses, references):
        tokens = [line.split() for line in pair]
        lengths = [total + len(side) for total, side in zip(lengths, tokens)]
        for order in range(4):
            counts = [
                Counter(tuple(side[i : i + order + 1]) for i in range(len(side) - order)) for side in tokens
            ]
            matches[order] += sum((counts[0] & counts[1]).values())
            totals[order] += sum(counts[0].values())
    if not all(matches):
        return 0.0
    mean = sum(math.log(match / total) for match, total in zip(matches, totals)) / 4
    return 100 * math.exp(min(0.0, 1 - lengths[1] / lengths[0]) + mean)


@pytest.fixture
def files(tmp_path):
    """Paths of the hypotheses and the references above."""
    for name, lines in (("sys", HYPOTHESES), ("ref", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(tmp_path / "sys"), str(tmp_path / "ref")


def run(capsys, *arguments):
    """Run the command, which must work; return what it printed, line by line."""
    assert main(["score", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()




def test_default_is_sacrebleu_with_its_signature(files, capsys, tmp_path):
    lines = run(capsys, "--sys", files[0], "--ref", files[1], "--json", tmp_path / "out.json")
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert lines[-1] == f"BLEU = {expected.score:.2f}"
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["bleu"] == pytest.approx(expected.score, abs=1e-9)
    assert result["precisions"] == pytest.approx(expected.precisions)
    assert (result["hypothesis_length"], result["reference_length"]) == (expected.sys_len, expected.ref_len)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert "case:mixed" in result["signature"] and "tok:13a" in result["signature"]
    assert sacrebleu.__version__ in result["signature"]
    assert any(line.startswith("signature") and result["signature"] in line for line in lines)
    assert (result["sentences"], result["hypotheses"], result["references"]) == (4, *files)


def test_tokenised_is_plain_bleu_and_labelled(files, capsys):
    lines = run(capsys, "--sys", files[0], "--ref", files[1], "--tokenized")
    assert lines[-1] == f"BLEU = {naive_bleu(HYPOTHESES, REFERENCES):.2f}"
    assert lines[0].startswith("measure") and "tokenised BLEU" in lines[0]
    assert "tok:none" in "\n".join(lines)


def test_compound_split_is_plain_bleu_of_the_split_text_and_labelled(files, capsys):
    lines = run(capsys, "--sys", files[0], "--ref", files[1], "--compound-split")
    sides = ([tool.split_compounds(line) for line in side] for side in (HYPOTHESES, REFERENCES))
    split = naive_bleu(*sides)
    assert lines[-1] == f"BLEU = {split:.2f}"
    assert split > naive_bleu(HYPOTHESES, REFERENCES)
    assert "inflated" in lines[0]


def test_lowercase(files, capsys, tmp_path):
    (tmp_path / "upper").write_text("\n".join(line.upper() for line in HYPOTHESES) + "\n", encoding="utf-8")
    plain = run(capsys, "--sys", files[0], "--ref", files[1], "--lowercase")
    upper = run(capsys, "--sys", tmp_path / "upper", "--ref", files[1], "--lowercase")
    assert plain == upper and "case:lc" in "\n".join(plain)
    assert plain[-1] == f"BLEU = {sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True).score:.2f}"


@pytest.mark.parametrize("lang", ["de", "zh"])
def test_lang_chooses_the_tokeniser_of_sacrebleu(files, lang):
    result = tool.compute(HYPOTHESES, [REFERENCES], "sacrebleu", lang=lang)
    expected = sacrebleu.BLEU(trg_lang=lang)
    assert result["bleu"] == pytest.approx(expected.corpus_score(HYPOTHESES, [REFERENCES]).score)
    assert ("tok:zh" if lang == "zh" else "tok:13a") in result["signature"]


def test_several_sets_of_references(files, capsys, tmp_path):
    second = [line.replace("the", "a") for line in HYPOTHESES]
    (tmp_path / "second").write_text("\n".join(second) + "\n", encoding="utf-8")
    both = ("--ref", files[1], "--ref", tmp_path / "second")
    lines = run(capsys, "--sys", files[0], *both, "--json", tmp_path / "out.json")
    metrics = sacrebleu.BLEU(), sacrebleu.CHRF()
    expected = [metric.corpus_score(HYPOTHESES, [REFERENCES, second]).score for metric in metrics]
    result = json.loads((tmp_path / "out.json").read_text())
    assert [result["bleu"], result["chrf"]] == pytest.approx(expected)
    assert result["signature"] == str(metrics[0].get_signature()) and "nrefs:2" in result["signature"]
    assert result["chrf_signature"] == str(metrics[1].get_signature())
    assert result["references"] == [files[1], str(tmp_path / "second")]
    assert lines[-1] == f"BLEU = {expected[0]:.2f}"
    one = tool.compute(HYPOTHESES, [REFERENCES], "compound-split")["bleu"]
    assert tool.compute(HYPOTHESES, [REFERENCES, second], "compound-split")["bleu"] > one
    (tmp_path / "second").write_text("a\n" * 3)
    error = fails(capsys, "--sys", files[0], *both)
    assert "sys has 4" in error and "second has 3" in error


# 7 and 4 words; their references have 9, 6, 5, 8 and 8, 7, 6, 9
FOUR_HYPOTHESES = ["The CAT sat on the mat today", "We Agree with them"]
FOUR_REFERENCES = [
    ["yesterday a cat was sitting on the old mat", "we are all in agreement with them now"],
    ["The cat sat on a Mat", "All of us agree with them ."],
    ["cats sit on mats today", "we do agree with those people"],
    ["today the cat is sitting on the mat", "they and we agree on this with each other"],
]


def test_tokenised_bleu_with_four_references_by_hand(tmp_path, capsys):
    """As multi-bleu.perl -lc: n-grams are clipped by the best reference, and the length is the closest reference's.

    1-grams 7 + 4 of 11. 2-grams without "mat today": 5 + 3 of 9. 3-grams "the cat sat", "cat sat on", "on the mat",
    "agree with them": 4 of 7. 4-grams "the cat sat on": 1 of 5. Closest lengths: 6, as near to 7 as 8 is and shorter;
    and 6, as near to 4 as any gets.
    """
    (tmp_path / "sys").write_text("\n".join(FOUR_HYPOTHESES) + "\n")
    words = ["--sys", tmp_path / "sys", "--tokenized"]
    for number, lines in enumerate(FOUR_REFERENCES):
        (tmp_path / f"ref{number}").write_text("\n".join(lines) + "\n")
        words += ["--ref", tmp_path / f"ref{number}"]
    lines = run(capsys, *words, "--lowercase", "--json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["precisions"] == pytest.approx([100.0, 100 * 8 / 9, 100 * 4 / 7, 100 * 1 / 5])
    assert (result["hypothesis_length"], result["reference_length"]) == (11, 12)
    expected = 100 * math.exp(1 - 12 / 11) * (8 / 9 * 4 / 7 * 1 / 5) ** 0.25
    assert result["bleu"] == pytest.approx(expected) and lines[-1] == f"BLEU = {expected:.2f}" == "BLEU = 51.55"
    assert all(part in result["signature"] for part in ("nrefs:4", "case:lc", "tok:none", "smooth:none"))
    assert run(capsys, *words)[-1] == "BLEU = 0.00", "with case no 4-gram is right"


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("a-b", "a ##AT##-##AT## b"),
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("a - b -c d-", "a - b -c d-"),
        ("a--b", "a ##AT##-##AT## -b"),
        ("\u00e4-\u00f6 x", "\u00e4 ##AT##-##AT## \u00f6 x"),
        ("a\u00a0-b", "a\u00a0 ##AT##-##AT## b"),
        ("", ""),
    ],
)
def test_compound_split_is_one_pass_without_overlap(line, split):
    assert tool.split_compounds(line) == split


@pytest.mark.parametrize(("hypothesis", "expected"), [("a b c d", 100.0), ("a b x d", 0.0), ("", 0.0)])
def test_extreme_tokenised_scores(hypothesis, expected):
    assert tool.compute([hypothesis], [["a b c d"]], "tokenized")["bleu"] == pytest.approx(expected)


def test_lines_end_at_newlines_alone(tmp_path, capsys):
    lines = ["one\u2028two three four five", "six\u0085seven eight nine ten", "eleven\x0ctwelve \x1cthirteen"]
    for name in ("sys", "ref"):
        (tmp_path / name).write_bytes(("\n".join(lines) + "\n").encode())
    printed = run(capsys, "--sys", tmp_path / "sys", "--ref", tmp_path / "ref")
    assert ["sentences", "3"] in [line.split() for line in printed]
    assert printed[-1] == "BLEU = 100.00"


def test_last_line_may_lack_its_newline_and_lines_may_be_empty(tmp_path, capsys):
    (tmp_path / "sys").write_text("a b c d e\n\na b c d e")
    (tmp_path / "ref").write_text("a b c d e\nx\na b c d e\n")
    assert ["sentences", "3"] in [
        line.split() for line in run(capsys, "--sys", tmp_path / "sys", "--ref", tmp_path / "ref")
    ]


def test_hypotheses_from_standard_input(files, capsys, monkeypatch):
    data = open(files[0], "rb").read()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(capsys, "--sys", "-", "--ref", files[1])[-1] == run(capsys, "--sys", *files[:1], "--ref", files[1])[-1]


def test_a_byte_order_mark_and_other_line_ends_are_no_text(files, tmp_path, capsys):
    """As an editor of Windows writes them; line separators of Unicode stay."""
    text = Path(files[1]).read_text()
    (tmp_path / "other").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert run(capsys, "--sys", tmp_path / "other", "--ref", files[1])[-1] == "BLEU = 100.00"
    (tmp_path / "odd").write_text("a\u2028b\rc\n\n", newline="")
    assert read_lines(str(tmp_path / "odd")) == ["a\u2028b\rc", ""]


def test_bad_input_takes_one_line_and_writes_nothing(files, tmp_path, capsys):
    out = ("--json", tmp_path / "out.json")
    (tmp_path / "three").write_text("a\nb\nc\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin1").write_bytes("gut\nsch\u00f6n\n".encode("latin-1"))
    error = fails(capsys, "--sys", tmp_path / "three", "--ref", files[1], *out)
    assert "three has 3" in error and "ref has 4" in error
    assert "empty is empty (0 lines)" in fails(capsys, "--sys", tmp_path / "empty", "--ref", files[1], *out)
    assert "cannot read" in fails(capsys, "--sys", tmp_path / "nowhere", "--ref", files[1], *out)
    assert "is not UTF-8 (line 2)" in fails(capsys, "--sys", tmp_path / "latin1", "--ref", files[1], *out)
    assert "--sys requires the references: add --ref" in fails(capsys, "--sys", files[0], *out)
    for flag in ("--hypotheses", "--references"):
        error = fails(capsys, "--sys", files[0], "--ref", files[1], flag, tmp_path / "x")
        assert f"{flag} requires --generate-output" in error
    error = fails(capsys, "--generate-output", files[0], "--detokenize", "de", "--tokenized")
    assert "--detokenize is not supported with --tokenized" in error
    error = fails(capsys, "--sys", files[0], "--ref", files[1], "--json", tmp_path / "no" / "out.json")
    assert "does not exist" in error
    assert sorted(os.listdir(tmp_path)) == ["empty", "latin1", "ref", "sys", "three"]


def test_missing_sacrebleu_names_its_cure(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    assert "pip install 'sacrebleu>=2'" in fails(capsys, "--sys", files[0], "--ref", files[1])


def test_missing_sacremoses_names_its_cure(tmp_path, capsys, monkeypatch):
    (tmp_path / "gen").write_text("T-0\ta\nH-0\t-1\ta\n")
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    error = fails(capsys, "--generate-output", tmp_path / "gen", "--detokenize", "de")
    assert "pip install sacremoses" in error


def test_tokenised_text_and_few_sub_words_are_warned_about(tmp_path, capsys):
    (tmp_path / "tok").write_text("this is a te@@ st .\n" + "this is a test .\n" * 199)
    assert main(["score", "--sys", str(tmp_path / "tok"), "--ref", str(tmp_path / "tok")]) == 0
    errors = capsys.readouterr().err.splitlines()
    assert "1 of 200 lines have sub-word marks" in errors[0] == errors[1]
    assert "200 hypotheses end in ' .'" in errors[2] and "200 references end in ' .'" in errors[3]


def test_a_few_lines_about_marks_and_texts_in_another_order(tmp_path, capsys):
    lines = [f"{index} {line}" for index, line in enumerate(REFERENCES * 8)]
    (tmp_path / "about").write_text("\n".join([*lines, "@@ -1,3 +1,3 @@"]) + "\n")
    assert run(capsys, "--sys", tmp_path / "about", "--ref", tmp_path / "about")[-1] == "BLEU = 100.00"
    (tmp_path / "ref").write_text("\n".join(lines) + "\n")
    (tmp_path / "shifted").write_text("\n".join(["x", *lines[:-1]]) + "\n")
    for systems in (["shifted"], ["ref", "shifted"]):
        systems = [str(tmp_path / name) for name in systems]
        assert main(["score", "--ref", str(tmp_path / "ref"), "--sys", *systems]) == 0
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "shifted has a BLEU of 0." in err and "in the order and the language" in err


def generation(hypothesis, reference="a house is here", decoded=None):
    return f"S-0\tein haus\nT-0\t{reference}\nH-0\t-0.1\t{hypothesis}\nD-0\t-0.1\t{decoded or hypothesis}\n"


PIECES = "\u2581a \u2581hou se \u2581is \u2581here"
UNSUITABLE = {
    "sub-words": ("a hou@@ se", "x", "sys: 1 of 1 lines have sub-word marks (@@); join"),
    "sub-words of the references": ("x", "a hou@@ se", "ref: 1 of 1 lines have sub-word marks (@@); join"),
    "pieces": (PIECES, "x", "sys: 1 of 1 lines have pieces of SentencePiece; join"),
    "pieces of the references": ("x", PIECES, "ref: 1 of 1 lines have pieces of SentencePiece; join"),
    "unknown words": ("x", "a <<unk>> is", "ref: 1 of 1 lines have unknown words (<<unk>>); give the text before"),
    "a log": ("H-0\t-0.1\ta house", "x", "sys: 1 of 1 lines have the format of fairseq-generate's output; give the"),
    "JSON": ('{"line": 1, "source": "x"}', "x", "sys: 1 of 1 lines have JSON; translate without --json"),
    "tokens": ("It 's .\n" * 4, "It's.\n" * 4, "sys is tokenised (4 lines end in ' .'), but "),
    "Chinese": ("\u6211\u4eec\u53bb", "\u6211\u4eec\u53bb", "ref has text without blanks between words; add --lang"),
    "Thai": ("\u0e1a\u0e49\u0e32\u0e19", "\u0e1a\u0e49\u0e32\u0e19", "ref has text without blanks"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUITABLE)
def test_text_that_is_not_to_be_scored(name, tmp_path, capsys):
    for side, text in zip(("sys", "ref"), UNSUITABLE[name]):
        (tmp_path / side).write_text(text.removesuffix("\n") + "\n", encoding="utf-8")
    assert UNSUITABLE[name][2] in fails(capsys, "--sys", tmp_path / "sys", "--ref", tmp_path / "ref")


@pytest.mark.parametrize("text, problem", [
    (generation("a house") + generation("a house"), "gen:5: sentence 0 has a S- line already (several"),
    ("H-0\t-1\ta\nH-1\t-1\tb\nH-0\t-1\tc\nH-1\t-1\td\n", "gen:3: sentence 0 has a H- line already (several"),
    (generation(PIECES, PIECES), "gen: 1 of 1 lines have pieces of SentencePiece"),
    (generation("a house") + "T-1\tb\nD-1\t-1\tb\n", "has 1 hypotheses for 2 references"),
    (generation("a house is here", "ahouseishere", "ahouseishere"), "since SentencePiece was decoded twice"),
    (generation("a house is here", "a <<unk>> is here"), "unknown words (<<unk>>); give the text before"),
])  # fmt: skip
def test_output_of_fairseq_generate_that_is_not_to_be_scored(text, problem, tmp_path, capsys):
    (tmp_path / "gen").write_text(text, encoding="utf-8")
    (tmp_path / "ref").write_text("a\nb\n")
    more = ["--ref", tmp_path / "ref"] if "T-" not in text else []
    assert problem in fails(capsys, "--generate-output", tmp_path / "gen", *more)


def test_chinese_words_may_be_joined_by_the_tokenizer(tmp_path, capsys):
    """Moses joins them in D- lines, as a second decoding of SentencePiece would; the language is --detokenize's."""
    words = "\u6211 \u4eec \u53bb \u54ea \u91cc"
    (tmp_path / "gen").write_text(generation(words, *[words.replace(" ", "")] * 2), encoding="utf-8")
    assert run(capsys, "--generate-output", tmp_path / "gen", "--detokenize", "zh_CN")[-1] == "BLEU = 100.00"


def test_the_best_hypothesis_in_any_order(tmp_path, capsys):
    """Also of output that was sorted as text."""
    lines = [f"H-0\t-{score}\ta {word} is here now" for score, word in ((1.5, "cat"), (0.2, "house"), (0.7, "dog"))]
    (tmp_path / "gen").write_text("\n".join([*lines, "T-0\ta house is here now", ""]))
    assert run(capsys, "--generate-output", tmp_path / "gen")[-1] == "BLEU = 100.00"


def test_compressed_text(files, tmp_path, capsys):
    expected = run(capsys, "--sys", files[0], "--ref", files[1])[-1]
    for name, path in zip(("sys.gz", "ref"), files):  # whatever its name
        (tmp_path / name).write_bytes(gzip.compress(Path(path).read_bytes()))
    assert run(capsys, "--sys", tmp_path / "sys.gz", "--ref", tmp_path / "ref")[-1] == expected
    (tmp_path / "ref").write_bytes((tmp_path / "ref").read_bytes()[:-9])
    assert "cannot read " in fails(capsys, "--sys", tmp_path / "sys.gz", "--ref", tmp_path / "ref")


@pytest.mark.parametrize("measure", [[], ["--tokenized"], ["--compound-split"]])
def test_several_systems(measure, files, tmp_path, capsys):
    """Each score as alone; p as of the pairs with --against."""
    (tmp_path / "better").write_text("".join(f"{line}\n" for line in [HYPOTHESES[0], *REFERENCES[1:]]))
    words, systems = [*measure, "--ref", files[1]], [files[0], str(tmp_path / "better"), files[1]]
    alone = [run(capsys, "--sys", path, *words)[-1].removeprefix("BLEU = ") for path in systems]
    more = ["--json", tmp_path / "out.json", "--resamples", 50]
    printed = run(capsys, "--sys", *systems[:2], "--sys", systems[2], *words, *more)
    assert printed[-1] == f"BLEU = {' '.join(alone)}" and alone[0] != alone[1] != alone[2]
    rows = [line.split() for line in printed if line.startswith(str(tmp_path))]
    assert [row[:2] for row in rows] == [list(pair) for pair in zip(systems, alone)]
    found = json.loads((tmp_path / "out.json").read_text())["systems"]
    assert found[0]["BLEU"]["p"] is None and all(0 < each["BLEU"]["p"] <= 1 for each in found[1:])
    if not measure:
        words += ["--against", systems[0], "--resamples", 50, "--json", tmp_path / "pair.json"]
        run(capsys, "--sys", systems[1], *words)
        pair = json.loads((tmp_path / "pair.json").read_text())["against"]["measures"]
        assert [found[1][name]["p"] for name in ("BLEU", "chrF")] == [pair[name]["p"] for name in ("BLEU", "chrF")]


def test_several_outputs_of_fairseq_generate_have_the_same_references(tmp_path, capsys):
    for name, reference in (("a", "a house is here"), ("b", "a house is here"), ("c", "a cat is here")):
        (tmp_path / name).write_text(generation("a house was here", reference))
    paths = [tmp_path / name for name in "abc"]
    assert run(capsys, "--generate-output", *paths[:2])[-1] == "BLEU = 35.36 35.36"
    assert "c has other references than " in fails(capsys, "--generate-output", *paths)
    for flag in ("--hypotheses", "--references", "--against"):
        error = fails(capsys, "--generate-output", *paths[:2], flag, tmp_path / "out")
        assert f"{flag} is not supported with several systems" in error
    assert "'-' is given twice" in fails(capsys, "--sys", "-", "-", "--ref", paths[0])


GENERATED = [
    "H\u00e4ngende Warnung: H-1 ist keine Zeile",
    "/env/hydra/compose.py:56: UserWarning:",
    "Hydra 1.3 changes the default",
    "H-bad\tnot one",
    "S-10\tzehn",
    "T-10\tten &apos;s a lot , really .",
    "H-10\t-0.5\tten &apos;s a lot , really .",
    "D-10\t-0.5\tten &apos;s a lot , really .",
    "P-10\t-0.1 -0.2",
    "T-2\ttwo words here now",
    "H-2\t-0.9\t",
    "D-2\t-0.9\t",
    "T-0\tone more line here",
    "H-0\t-0.2\tone more line here",
    "H-0\t-0.7\tsecond best",
    *(line for i in (1, 3, 4, 5, 6, 7, 8, 9) for line in (f"T-{i}\tword {i} is here", f"H-{i}\t-1\tword {i} is here")),
    "2020-01-01 | INFO | fairseq_cli.generate | NOTE: hypothesis and token scores are output in base 2",
    "Generate test with beam=4: BLEU4 = 99.00",
]


@pytest.fixture
def generated(tmp_path):
    """Path of an output of fairseq-generate: 11 sentences in the order of batches, between noise."""
    (tmp_path / "gen").write_text("\n".join(GENERATED) + "\n", encoding="utf-8")
    return str(tmp_path / "gen")


def test_generated_lines_are_ordered_by_number(generated, tmp_path, capsys):
    outputs = ("--hypotheses", tmp_path / "hyp", "--references", tmp_path / "ref")
    printed = run(capsys, "--generate-output", generated, "--tokenized", *outputs)
    hypotheses = (tmp_path / "hyp").read_text().split("\n")[:-1]
    references = (tmp_path / "ref").read_text().split("\n")[:-1]
    assert hypotheses[:4] == ["one more line here", "word 1 is here", "", "word 3 is here"]
    assert hypotheses[10] == "ten &apos;s a lot , really ." and len(hypotheses) == len(references) == 11
    assert references[2] == "two words here now"
    assert printed[-1] == f"BLEU = {naive_bleu(hypotheses, references):.2f}"
    again = run(capsys, "--sys", tmp_path / "hyp", "--ref", tmp_path / "ref", "--tokenized")
    assert again == printed


def test_generated_lines_are_detokenised_on_both_sides(generated, tmp_path, capsys):
    pytest.importorskip("sacremoses")
    outputs = ("--hypotheses", tmp_path / "hyp", "--references", tmp_path / "ref")
    run(capsys, "--generate-output", generated, "--detokenize", "en", *outputs)
    for name in ("hyp", "ref"):
        assert (tmp_path / name).read_text().split("\n")[10] == "ten's a lot, really."


def test_decoded_line_beats_the_raw_one():
    lines = ["T-0\tI'm here.", "H-0\t-1\tI &apos;m h@@ ere .", "D-0\t-1\tI'm here."]
    kinds = parse_generated(lines, "out")[0]
    assert best(kinds) == kinds["T"] == "I'm here." and kinds["H"] == "I &apos;m h@@ ere ."


def test_empty_hypothesis_may_have_lost_its_last_tab():
    assert parse_generated(["T-0", "H-0\t-1.5"], "out") == {0: {"T": "", "H": ""}}


def test_references_may_come_from_a_file(generated, tmp_path, capsys):
    (tmp_path / "raw").write_text("".join(f"word {i} is here\n" for i in range(11)))
    run(capsys, "--generate-output", generated, "--ref", tmp_path / "raw", "--references", tmp_path / "ref")
    assert (tmp_path / "ref").read_text() == (tmp_path / "raw").read_text()
    (tmp_path / "raw").write_text("".join(f"word {i} is here\n" for i in range(12)))
    error = fails(capsys, "--generate-output", generated, "--ref", tmp_path / "raw")
    assert "11 hypotheses for 12 references" in error and "sentence 11" in error


def test_several_references_of_a_generation_are_written_one_by_one(generated, tmp_path, capsys):
    words = ["--generate-output", generated]
    for number in (0, 1):
        (tmp_path / f"raw{number}").write_text("".join(f"word {i} is {number}\n" for i in range(11)))
        words += ["--ref", tmp_path / f"raw{number}", "--references", tmp_path / f"ref{number}"]
    assert any("nrefs:2" in line for line in run(capsys, *words))
    for number in (0, 1):
        assert (tmp_path / f"ref{number}").read_text() == (tmp_path / f"raw{number}").read_text()
    error = fails(capsys, *words[:-2])
    assert "--references is given 1 time(s) for 2 set(s) of references" in error
    (tmp_path / "raw1").write_text("x\n" * 10)
    error = fails(capsys, *words)
    assert "11 hypotheses for 10 references" in error and "raw1" in error


def test_incomplete_generation_is_refused_or_warned_about(tmp_path, capsys):
    path = tmp_path / "gen"
    path.write_text("T-0\ta b c d\nH-0\t-1\ta b c d\nT-1\te\n")
    assert "1 hypotheses for 2 references" in fails(capsys, "--generate-output", path)
    path.write_text("H-0\t-1\ta b c d\n")
    assert "no line 'T-...'" in fails(capsys, "--generate-output", path)
    path.write_text("nothing\n")
    assert "no line 'H-...'" in fails(capsys, "--generate-output", path)
    path.write_text("T-0\ta b c d\nH-0\t-1\ta b c d\nT-2\te f g h\nH-2\t-1\te f g h\n")
    assert main(["score", "--generate-output", str(path)]) == 0
    assert "2 sentences of at least 3 (first missing: 1)" in capsys.readouterr().err


def test_real_command(files):
    result = commands.run("fairseq-deep", "score", "--sys", "-", "--ref", files[1], stdin=Path(files[0]).read_text())
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert result.stdout.splitlines()[-1] == f"BLEU = {expected:.2f}"


@pytest.mark.parametrize("words", [
    ["--sys", "a", "--ref", "b", "--json", "a"], ["--sys", "a", "--ref", "b", "--json", "./b"],
    ["--generate-output", "g", "--hypotheses", "g"], ["--generate-output", "g", "--references", "g"],
    ["--generate-output", "g", "--hypotheses", "o", "--references", "o"],
    ["--generate-output", "g", "--hypotheses", "o", "--json", "o"],
    ["--sys", "a", "--ref", "b", "--against", "c", "--json", "link"],
])  # fmt: skip
def test_no_output_is_an_input_or_another_output(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    texts = {"a": "x\n", "b": "y\n", "c": "z\n", "g": "T-0\ty\nH-0\t-1\tx\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("c")
    assert main(["score", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "give another name" in captured.err and captured.out == ""
    assert {name: (tmp_path / name).read_text() for name in texts} == texts and not (tmp_path / "o").exists()


def test_a_tokeniser_that_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    from sacrebleu import metrics

    def refuse(**options):
        raise RuntimeError("\nJapanese tokenization requires\nextra dependencies\n")

    monkeypatch.setattr(metrics, "BLEU", refuse)
    (tmp_path / "a").write_text("x\n")
    assert main(["score", "--sys", str(tmp_path / "a"), "--ref", str(tmp_path / "a"), "--lang", "ja"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "sacreBLEU requires a tokenizer for 'ja': pip install 'sacrebleu[ja]'" in error
