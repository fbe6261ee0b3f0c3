"""fairseq-deep score: measures and paired bootstrap against sacreBLEU itself, tokenised BLEU against its definition."""

import json
import math
import os

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from fairseq_deep.tools import score as tool
from fairseq_deep.tools import significance
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
SECOND = [line.replace("the", "a") for line in HYPOTHESES]  # other references


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


@pytest.mark.parametrize("words, sets, settings, part", [
    ([], [REFERENCES], {}, "tok:13a"), (["--ref", "second"], [REFERENCES, SECOND], {}, "nrefs:2"),
    (["--lang", "de"], [REFERENCES], {"trg_lang": "de"}, "tok:13a"),
    (["--lang", "zh"], [REFERENCES], {"trg_lang": "zh"}, "tok:zh"),
])  # fmt: skip
def test_the_default_is_sacrebleu_with_its_signature(files, score, tmp_path, monkeypatch, words, sets, settings, part):
    write(tmp_path, second=SECOND)
    monkeypatch.chdir(tmp_path)
    lines, result, _ = score("--sys", files[0], "--ref", files[1], *words)
    metrics = sacrebleu.BLEU(**settings), sacrebleu.CHRF()
    expected, chrf = (metric.corpus_score(HYPOTHESES, sets) for metric in metrics)
    assert lines[-1] == f"BLEU = {expected.score:.2f}" and part in result["signature"]
    assert [result["bleu"], result["chrf"]] == pytest.approx([expected.score, chrf.score], abs=1e-9)
    assert result["precisions"] == pytest.approx(expected.precisions) and result["sentences"] == 4
    assert (result["hypothesis_length"], result["reference_length"]) == (expected.sys_len, expected.ref_len)
    signatures = [str(metric.get_signature()) for metric in metrics]
    assert [result["signature"], result["chrf_signature"]] == signatures and signatures[0] in "\n".join(lines)


def plain(hypotheses, references):
    """BLEU on white-space tokens, without smoothing, of which another test has the definition."""
    return sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", smooth_method="none", force=True).score


def test_tokenised_and_compound_split_are_plain_bleu_and_labelled(files, score):
    split = [[tool.split_compounds(line) for line in side] for side in (HYPOTHESES, REFERENCES)]
    expected = plain(HYPOTHESES, REFERENCES), plain(*split)
    assert expected[0] < expected[1]
    for measure, bleu, label in zip(("tokenized", "compound-split"), expected, ("tokenised BLEU", "inflated")):
        words = ["--ref", files[1], f"--{measure}", "--sys", files[0]]
        lines, *_ = score(*words)
        assert lines[-1] == f"BLEU = {bleu:.2f}" and label in lines[0] and "tok:none" in "\n".join(lines)
        assert score(*words, files[1], "--resamples", 9)[0][-1] == f"{lines[-1]} 100.00"


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


def test_lines_end_at_newlines_alone(tmp_path):
    line = "one\u2028two\u0085three\x0cfour\x1cfive\rsix"
    (tmp_path / "odd").write_text(f"{line}\r\n\n", encoding="utf-8", newline="")
    assert read_lines(str(tmp_path / "odd")) == [line, ""]


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


def test_systems_are_compared_by_sacrebleus_paired_bootstrap(files, tmp_path, score, monkeypatch):
    """With a fixed seed: several in one table, and two by --against a run or a file."""
    texts = HYPOTHESES, [HYPOTHESES[0], *REFERENCES[1:]], REFERENCES
    metrics, sets = {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()}, [REFERENCES, SECOND]
    _, expected = PairedTest([*zip("abc", texts)], metrics, sets, "bs", 50)()
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    systems = [files[0], *write(tmp_path, better=texts[1]), files[1]]
    words = ["--ref", files[1], "--ref", *write(tmp_path, second=SECOND), "--resamples", 50]
    printed, record, _ = score("--sys", *systems[:2], "--sys", systems[2], *words)
    assert os.environ["SACREBLEU_SEED"] == "7" and "50 resamples, seed 12345" in "\n".join(printed)
    assert printed[-1] == "BLEU = " + " ".join(f"{each.score:.2f}" for each in expected["BLEU"])
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", **{"test.hyp.de": HYPOTHESES, "test.hyp.en": REFERENCES, "test.ref.de": REFERENCES,
                               "test.ref1.de": SECOND})  # fmt: skip
    for name, key in (("BLEU", "BLEU"), ("chrF", "chrF2")):
        want = [{"score": each.score, "mean": float(each.mean), "ci": float(each.ci)} for each in expected[key]]
        found = [each[name] for each in record["systems"]]
        assert found == [{**each, "p": one.p_value} for each, one in zip(want, expected[key])] and 0 < found[1]["p"] < 1
        for other in ("run", "run/test.hyp.de"):
            _, pair, _ = score("--sys", systems[1], *words, "--lang", "de", "--against", tmp_path / other)
            against = pair["against"]["measures"][name]
            assert (against["other"], against["ours"], against["p"]) == (want[0], want[1], found[1]["p"])
            assert against["difference"] == want[1]["score"] - want[0]["score"] and "bs:50|" in against["signature"]
    rows = [line.removeprefix("BLEU").split() for line in printed if line.lstrip("BLEU ").startswith(str(tmp_path))]
    assert [row[1] for row in rows[:3]] == printed[-1].split()[2:]
    assert [f"{float(row[-2]):.1f}" for row in rows[1:3]] == [f"{each.score - expected['BLEU'][0].score:.1f}"
                                                              for each in expected["BLEU"][1:]]  # fmt: skip


def test_the_same_text_and_texts_of_one_score_are_no_difference(files, score):
    words = ["--sys", files[0], "--ref", files[1], "--against", files[0]]
    assert "\n".join(score(*words, "--resamples", 50)[0]).count("+0.00  1.000") == 2
    # a wrong word instead of another: no statistic of BLEU differs
    one, other = ([line.replace("girl", word) for line in REFERENCES] for word in ("quux", "quiz"))
    found = significance.paired_bootstrap([("a", one), ("b", other)], [REFERENCES], {"BLEU": sacrebleu.BLEU()}, 50)
    first, second = found["BLEU"].systems
    assert one != other and first["score"] == second["score"] < 100 and second["p"] == 1.0


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
