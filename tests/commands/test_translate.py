"""``fairseq-deep translate``: raw text in, raw text out, as fairseq-generate and the score tool have it."""

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import Translator, find_bundle, read_stored, text
from fairseq_deep.runtime.loading import languages_of
from tests.helpers.commands import BIN, run
from tests.helpers.exports import GENERATE
from tests.helpers.forkserver import in_fork

POSITIONS = 24  # of the model of the fixture "trained"
GREEDY = ["--beam", 1]  # where batches differ, and with them the rounding that decides between near hypotheses


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    """What a checkpoint needs, in one folder."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("averaged.pt", "data-bin/dict.en.txt", "data-bin/dict.de.txt", "text/bpe/code", "text/bpe/steps.json"):
        shutil.copy(trained / name, folder)
    return folder


@pytest.fixture(scope="module")
def source(trained):
    return trained / "text/raw/test.en"


@pytest.fixture
def translate(command, monkeypatch):
    """translate(*words, text=None): exit code, output and errors."""

    def translate(*words, text=None):
        if text is not None:
            data = text if isinstance(text, bytes) else text.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
        return command("translate", *words, "--cpu")

    return translate


def generated(trained, path, tmp_path):
    """Raw translations of the test set, and their scores, by fairseq-generate and the score tool."""
    output, hypotheses = tmp_path / "generate.txt", tmp_path / "hyp"
    output.write_text(run("fairseq-generate", trained / "data-bin", *GENERATE, "--remove-bpe", "--path", path).stdout)
    words = ["score", "--generate-output", output, "--detokenize", "de", "--hypotheses", hypotheses, "--ref",
             trained / "text/raw/test.de"]  # fmt: skip
    assert cli.main([*map(str, words)]) == 0
    entries = [line.split("\t") for line in output.read_text().splitlines() if line.startswith("H-")]
    scores = {int(entry[0][2:]): float(entry[1]) for entry in entries}
    return hypotheses.read_text().splitlines(), [scores[index] for index in range(len(scores))]


def test_it_is_what_generate_and_score_give(trained, source, alone, translate, tmp_path):
    """Beam and length penalty come from the experiment, or are given for a checkpoint."""
    want, scores = generated(trained, trained / "averaged.pt", tmp_path)
    assert len({*want}) > 5
    code, out, err = translate(trained, "--input", source)
    assert (code, out.splitlines(), err) == (0, want, "")
    assert translate(alone / "averaged.pt", "--input", source, "--beam", 3, "--lenpen", 0.8)[1] == out
    code, out, _ = translate(trained, "--input", source, "--json", "--nbest", 2)
    found = [json.loads(line) for line in out.splitlines()]
    assert [entry["line"] for entry in found] == list(range(1, 41))
    assert [entry["source"] for entry in found] == source.read_text().splitlines()
    assert [entry["translations"][0]["text"] for entry in found] == want
    assert [entry["translations"][0]["score"] for entry in found] == pytest.approx(scores, abs=2e-3)
    assert all(first["score"] >= second["score"] for first, second in (entry["translations"] for entry in found))


def test_an_ensemble_is_that_of_fairseq(trained, source, alone, translate, tmp_path):
    earlier = next(trained.glob("checkpoints/checkpoint_*_110.pt"))
    want, _ = generated(trained, f"{trained / 'averaged.pt'}:{earlier}", tmp_path)
    flags = ["--data", trained / "data-bin", "--bpe-codes", alone / "code"]
    code, out, _ = translate(trained, earlier, "--input", source, *flags)
    assert code == 0 and out.splitlines() == want
    assert out != translate(trained, "--input", source)[1]


def test_the_search_is_that_of_the_recipe(trained, source, tmp_path, translate):
    for part in ("averaged.pt", "data-bin", "text"):
        (tmp_path / part).symlink_to(trained / part)
    settings = {"beam": 3, "lenpen": 0.8, "max_len_a": 0.2, "max_len_b": 1, "gnmt_lenpen": True}
    (tmp_path / "RESULT.json").write_text(json.dumps(settings))
    words = ["--input", source]
    ours, usual = (translate(folder, *words)[1] for folder in (tmp_path, trained))
    own = ["--max-len-a", "0.2", "--max-len-b", "1", "--gnmt-lenpen"]
    assert ours == translate(trained, *words, *own)[1] != usual
    assert translate(tmp_path, *words, "--max-len-a", "1", "--max-len-b", "50")[1] != ours
    line, found = source.read_text().splitlines()[0], []
    for folder in (tmp_path, trained):
        search = {"beam": 3, "lenpen": 0.8, "max_len_a": 1, "max_len_b": 50, "nbest": 3, "cpu": True}
        found.append(Translator([find_bundle(str(folder))], **search).translate_nbest([line])[0])
    scores = {each.text: each.score for each in found[1]}
    for each in found[0]:  # (5 + n) / 6 is less than n, and divides by less
        assert each.score < scores[each.text]


def test_progress_on_a_terminal_is_shown_after_each_batch(trained, source, tmp_path, monkeypatch, translate):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = translate(trained, "--input", source, "--batch-size", 8, "--output", tmp_path / "out")
    shown = re.findall(r"\r([\d,]+) of 40 lines, [\d,]+ per second", err)
    assert code == 0 and shown[:2] == ["8", "16"] and shown[-1] == "40"


def test_lines_keep_their_places(trained, source, translate, tmp_path):
    """Empty ones, and blanks at the ends, in whatever batches, and from whatever file."""
    lines = source.read_text().splitlines()
    want = dict(zip(lines, translate(trained, *GREEDY, text="\n".join(lines))[1].split("\n")))
    want.update({"": "", "   ": ""})
    mixed = ["", *lines[::-1], "", "   ", lines[0]]
    text = "\n".join(mixed) + "\n"
    expected = "".join(want[line] + "\n" for line in mixed)
    for words in ([], ["--batch-size", 1], ["--max-tokens", 12], ["--line-by-line"]):
        assert translate(trained, *GREEDY, *words, text=text) == (0, expected, ""), words
    windows = "\ufeff" + "".join(f"{line}  \r\n" for line in mixed)
    assert translate(trained, *GREEDY, "--output", tmp_path / "out", text=windows)[:2] == (0, "")
    assert (tmp_path / "out").read_text() == expected
    for name, data in (("in", windows.encode()), ("in.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert translate(trained, *GREEDY, "--input", tmp_path / name) == (0, expected, "")


def test_a_line_that_is_too_long_is_left_empty(trained, translate):
    code, out, err = translate(trained, text="We see.\n" + "we see the house " * 9 + "\nWe see.\n")
    first, empty, last = out.splitlines()
    assert code == 1 and first == last and empty == ""
    assert err == (
        f"fairseq-deep translate: line 2 has more tokens than the model's {POSITIONS} positions: "
        "its translation is empty; split it\n"
    )


def test_the_case_is_folded_where_it_was_in_training(alone, translate, tmp_path):
    shutil.copytree(alone, tmp_path / "alone")
    before = translate(alone / "averaged.pt", text="the house is old\nTHE HOUSE IS OLD\n")[1].splitlines()
    assert before[0] != before[1]
    flagged = translate(alone / "averaged.pt", "--lowercase", text="THE HOUSE IS OLD\n")[1].splitlines()
    (tmp_path / "alone/steps.json").write_text('{"tokenizer": "moses", "lowercase": true}')
    after = translate(tmp_path / "alone/averaged.pt", text="THE HOUSE IS OLD\n")[1].splitlines()
    assert flagged == after == before[:1]


def test_a_process_that_stays_answers_each_line(trained):
    words = in_fork(["fairseq-deep", "translate"])
    child = subprocess.Popen([*words, trained, "--line-by-line", "--cpu"], stdin=subprocess.PIPE, text=True,
                             stdout=subprocess.PIPE, encoding="utf-8")  # fmt: skip
    answers = []
    for line in ("We see.", "", "The house is green!"):
        print(line, file=child.stdin, flush=True)
        answers.append(child.stdout.readline())
    child.stdin.close()
    assert child.wait(60) == 0 and child.stdout.read() == ""
    assert answers[1] == "\n" and answers[0] != answers[2] and all(answer.endswith("\n") for answer in answers)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_precisions_translate_nearly_alike(precision, trained, source, translate):
    exact = translate(trained, "--input", source)[1].splitlines()
    code, out, _ = translate(trained, "--input", source, "--decode-precision", precision)
    assert code == 0 and sum(map(str.__eq__, out.splitlines(), exact)) >= 30


def test_translations_are_utf_8_whatever_the_locale(trained, source):
    """The input is UTF-8, too. Otherwise a letter that the locale lacks would end the output."""
    words = [BIN / "fairseq-deep", "translate", trained, "--input", source]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done, usual = (subprocess.run(words, capture_output=True, env=env) for env in (environment, None))
    assert done.returncode == 0, done.stderr
    assert done.stdout == usual.stdout and "grün".encode() in done.stdout


def test_text_that_the_model_does_not_know_is_named(trained, translate):
    code, out, err = translate(trained, text="Дом зелёный.\nWe see.\n")
    assert code == 0 and out.count("\n") == 2 and err.count("\n") == 1
    assert re.search(r"warning: (\d+) of \d+ tokens of the text are unknown to the model; check", err)
    assert translate(trained, text="Дом\nWe see the house. We see the house.\n")[2] == ""


def test_text_in_sub_words_and_doubtful_merges_are_warned_of(trained, source, translate, monkeypatch):
    cut = "We see the h@@ ou@@ se.\n"
    warning = "warning: 1 of 2 lines are in sub-words already, and were split again; give raw text\n"
    assert translate(trained, text=f"{cut}We see.\n")[2].endswith(warning)
    assert translate(trained, text=f"{cut}{source.read_text()}")[2] == ""
    monkeypatch.setattr(text, "check_fit", lambda *_: "CODE splits words")
    assert translate(trained, text="We see.\n")[2] == "fairseq-deep translate: warning: CODE splits words\n"


def test_a_line_that_is_not_utf8_ends_the_answers(trained, translate):
    code, out, err = translate(trained, "--line-by-line", text="We see.\nWir sähen.\n".encode("latin-1"))
    assert code == 2 and out.count("\n") == 1
    assert "stdin is not UTF-8 (line 2); decompress it, or convert it with iconv" in err


def test_from_python(trained):
    translator = Translator(str(trained), beam=2, nbest=2, cpu=True)
    found = translator.translate_nbest(["We see.", ""])
    assert translator.translate("We see.") == found[0][0].text
    assert translator.translate(["We see.", ""]) == [found[0][0].text, ""] and translator.translate([]) == []
    assert Translator([trained], beam=2, nbest=2, cpu=True).translate_nbest(["We see."]) == found[:1]
    assert translator.translate_nbest(line for line in ["We see.", ""]) == found
    assert len(found[0]) == 2 and found[0][0].score >= found[0][1].score and found[1][0].text == ""


def test_languages_are_those_of_the_data(trained, alone, tmp_path):
    """As binarised data name them; dictionaries name the other one of the language that is given."""
    folder = shutil.copytree(alone, tmp_path / "alone")
    state = torch.load(folder / "averaged.pt", weights_only=False)
    state["cfg"]["task"]["source_lang"] = state["cfg"]["task"]["target_lang"] = None
    torch.save(state, folder / "averaged.pt")
    task = read_stored(str(folder / "averaged.pt")).task
    cases = (({"data": str(trained / "data-bin")}, "en de"), ({"source_lang": "en"}, "en de"))
    cases += (({"target_lang": "en"}, "de en"),)
    for given, languages in cases:
        found = languages_of(find_bundle(str(folder / "averaged.pt"), **given), task)
        assert " ".join(found) == languages, given


@pytest.fixture(scope="module")
def hub(trained):
    return DeepTransformerModel.from_pretrained(
        str(trained), "averaged.pt", bpe="subword_nmt", bpe_codes=str(trained / "text/bpe/code"), tokenizer="moses"
    )


def test_the_hub_translates_as_translate_does(hub, trained, source):
    """Also empty sentences, and those that are skipped as too long; it finds the dictionaries of a recipe."""
    assert hub.task.source_dictionary == hub.task.load_dictionary(str(trained / "data-bin/dict.en.txt"))
    lines = source.read_text().splitlines()[:5]
    want = Translator(str(trained), beam=3, lenpen=0.8, max_len_a=0, max_len_b=200, cpu=True).translate(lines)
    assert hub.translate(lines, beam=3, lenpen=0.8) == want and hub.translate(lines[0], beam=3, lenpen=0.8) == want[0]
    assert hub.translate("") == hub.translate("  ") == hub.sample("") == "" and hub.translate([]) == []
    mixed = ["", lines[0], "We see " * POSITIONS, lines[1], " "]
    found = hub.translate(mixed, beam=3, lenpen=0.8, skip_invalid_size_inputs=True, verbose=True)
    assert found == ["", want[0], "", want[1], ""]
    counts = map(len, hub.generate(map(hub.encode, mixed), skip_invalid_size_inputs=True))
    assert [*counts] == [1, 5, 0, 5, 1]


def test_all_arguments_of_the_hub_hold_for_one_sentence(hub):
    tokens, word = hub.encode("We see."), hub.tgt_dict.index("Wir")
    options = {"prefix_allowed_tokens_fn": lambda *_: [word, hub.tgt_dict.eos()], "max_len_b": 3}
    for found in (hub.generate(tokens, 2, **options), hub.generate([tokens], 2, **options)[0]):
        assert {*found[0]["tokens"].tolist()} <= {word, hub.tgt_dict.eos()}
    prefix = {"inference_step_args": {"prefix_tokens": torch.tensor([[word]])}}
    assert hub.generate(tokens, 2, **prefix)[0]["tokens"][0] == word
    assert hub.generate(hub.encode("We see " * POSITIONS), skip_invalid_size_inputs=True) == []
    assert len(hub.generate(tokens, np.int64(4))) == 4 and hub.sample("We see.", beam=2, sampling=True, sampling_topk=2)
