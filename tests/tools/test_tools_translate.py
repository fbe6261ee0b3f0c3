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
from sentencepiece import SentencePieceTrainer

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import Translator, find_bundle, read_stored
from fairseq_deep.runtime.loading import languages_of
from fairseq_deep.tools import main
from tests.helpers import forkserver
from tests.helpers.commands import run
from tests.helpers.tools import GENERATE

POSITIONS = 24  # of the model of the fixture "trained"

GREEDY = ["--beam", 1]  # where batches differ, and with them the rounding that decides between near hypotheses


@pytest.fixture(scope="module")
def earlier(trained):
    return next(trained.glob("checkpoints/checkpoint_*_110.pt"))


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    """What a checkpoint needs, in one folder."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("averaged.pt", "data-bin/dict.en.txt", "data-bin/dict.de.txt", "text/bpe/code", "text/bpe/steps.json"):
        shutil.copy(trained / name, folder)
    return folder


def test_the_longest_output_is_that_of_the_recipe(trained, tmp_path):
    for part in ("averaged.pt", "data-bin", "text"):
        (tmp_path / part).symlink_to(trained / part)
    words = ["translate", "--input", trained / "text/raw/test.en"]
    bound = ["--max-len-a", "0.2", "--max-len-b", "1"]
    (tmp_path / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8, "max_len_a": 0.2, "max_len_b": 1}))
    short, usual = (run("fairseq-deep", *words, *more).stdout for more in ([tmp_path], [trained]))
    assert short == run("fairseq-deep", *words, trained, *bound).stdout != usual
    assert run("fairseq-deep", *words, tmp_path, "--max-len-a", "1", "--max-len-b", "50").stdout == usual


def test_progress_on_a_terminal_is_shown_after_each_batch(trained, tmp_path, monkeypatch, capsys):
    words = ["translate", trained, "--input", trained / "text/raw/test.en", "--batch-size", 8, "--cpu"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main.main([*map(str, words), "--output", str(tmp_path / "out")]) == 0
    shown = re.findall(r"\r([\d,]+) of 40 lines, [\d,]+ per second", capsys.readouterr().err)
    assert shown[:2] == ["8", "16"] and shown[-1] == "40"


def test_the_length_penalty_is_that_of_the_recipe(trained, tmp_path):
    for part in ("averaged.pt", "data-bin", "text"):
        (tmp_path / part).symlink_to(trained / part)
    (tmp_path / "RESULT.json").write_text(json.dumps({"beam": 3, "lenpen": 0.8, "gnmt_lenpen": True}))
    bundle = find_bundle(str(tmp_path))
    assert bundle.gnmt_lenpen and not find_bundle(str(trained)).gnmt_lenpen
    ours, stock = (Translator([each], beam=3, lenpen=0.8, nbest=3) for each in (bundle, find_bundle(str(trained))))
    line = (trained / "text/raw/test.en").read_text().splitlines()[0]
    scores = {each.text: each.score for each in stock.translate_nbest([line])[0]}
    for each in ours.translate_nbest([line])[0]:  # (5 + n) / 6 is less than n, and divides by less
        assert each.score < scores[each.text]
    words = ["translate", tmp_path, "--input", trained / "text/raw/test.en"]
    assert run("fairseq-deep", *words).stdout == run("fairseq-deep", *words, "--gnmt-lenpen").stdout


def generated(trained, path, tmp_path):
    """Raw translations of the test set, and their scores, by fairseq-generate and the score tool."""
    output = tmp_path / "generate.txt"
    output.write_text(run("fairseq-generate", trained / "data-bin", *GENERATE, "--remove-bpe", "--path", path).stdout)
    hypotheses, references = tmp_path / "hyp", tmp_path / "ref"
    run("fairseq-deep", "score", "--generate-output", output, "--detokenize", "de", "--hypotheses", hypotheses,
        "--references", references, "--ref", trained / "text/raw/test.de")  # fmt: skip
    entries = [line.split("\t") for line in output.read_text().splitlines() if line.startswith("H-")]
    scores = {int(entry[0][2:]): float(entry[1]) for entry in entries}
    return hypotheses.read_text().splitlines(), [scores[index] for index in range(len(scores))]


@pytest.fixture
def translate(capsys, monkeypatch):
    """translate(*words, text=None): exit code, output and errors."""

    def translate(*words, text=None):
        if text is not None:
            data = text if isinstance(text, bytes) else text.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        code = main.main(["translate", *map(str, words), "--cpu"])
        return code, *capsys.readouterr()

    return translate


def test_it_is_what_generate_and_score_give(trained, translate, tmp_path):
    """With the beam and the length penalty of the experiment."""
    want, scores = generated(trained, trained / "averaged.pt", tmp_path)
    assert len({*want}) > 5
    code, out, err = translate(trained, "--input", trained / "text/raw/test.en")
    assert (code, out.splitlines(), err) == (0, want, "")
    code, out, _ = translate(trained, "--input", trained / "text/raw/test.en", "--json", "--nbest", 2)
    found = [json.loads(line) for line in out.splitlines()]
    assert [entry["line"] for entry in found] == list(range(1, 41))
    assert [entry["source"] for entry in found] == (trained / "text/raw/test.en").read_text().splitlines()
    assert [entry["translations"][0]["text"] for entry in found] == want
    assert [entry["translations"][0]["score"] for entry in found] == pytest.approx(scores, abs=2e-3)
    assert all(first["score"] >= second["score"] for first, second in (entry["translations"] for entry in found))


def test_an_ensemble_is_that_of_fairseq(trained, earlier, alone, translate, tmp_path):
    want, _ = generated(trained, f"{trained / 'averaged.pt'}:{earlier}", tmp_path)
    source = trained / "text/raw/test.en"
    flags = ["--data", trained / "data-bin", "--bpe-codes", alone / "code"]
    code, out, _ = translate(trained, earlier, "--input", source, *flags)
    assert code == 0 and out.splitlines() == want
    assert out != translate(trained, "--input", source)[1]


def test_a_checkpoint_with_its_parts_beside_it(trained, alone, translate):
    words = ["--input", trained / "text/raw/test.en", "--beam", 3, "--lenpen", 0.8]
    assert translate(alone / "averaged.pt", *words)[1] == translate(trained, *words)[1]


def test_lines_keep_their_places(trained, translate, tmp_path):
    """Empty ones, and blanks at the ends, in whatever batches."""
    lines = (trained / "text/raw/test.en").read_text().splitlines()
    want = dict(zip(lines, translate(trained, *GREEDY, text="\n".join(lines))[1].split("\n")))
    want.update({"": "", "   ": ""})
    mixed = ["", *lines[::-1], "", "   ", lines[0]]
    text = "\n".join(mixed) + "\n"
    expected = "".join(want[line] + "\n" for line in mixed)
    for words in ([], ["--batch-size", 1], ["--max-tokens", 12], ["--line-by-line"]):
        assert translate(trained, *GREEDY, *words, text=text) == (0, expected, ""), words
    windows = "".join(f"{line}  \r\n" for line in mixed)
    assert translate(trained, *GREEDY, "--output", tmp_path / "out", text=windows)[:2] == (0, "")
    assert (tmp_path / "out").read_text() == expected
    assert translate(trained, text="") == (0, "", "")


def test_a_line_that_is_too_long_is_left_empty(trained, translate, monkeypatch):
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
    words = [sys.executable, "-I", forkserver.__file__, "call", forkserver.server().path, "fairseq-deep", "translate"]
    child = subprocess.Popen([*words, trained, "--line-by-line", "--cpu"], stdin=subprocess.PIPE, text=True,
                             stdout=subprocess.PIPE, encoding="utf-8")  # fmt: skip
    answers = []
    for line in ("We see.", "", "The house is green!"):
        print(line, file=child.stdin, flush=True)
        answers.append(child.stdout.readline())
    child.stdin.close()
    assert child.wait(60) == 0 and child.stdout.read() == ""
    assert answers[1] == "\n" and answers[0] != answers[2] and all(answer.endswith("\n") for answer in answers)


def test_in_other_precisions(trained, translate):
    source = trained / "text/raw/test.en"
    exact = translate(trained, "--input", source)[1].splitlines()
    for precision in ("bf16", "int8"):
        code, out, _ = translate(trained, "--input", source, "--decode-precision", precision)
        assert code == 0 and sum(map(str.__eq__, out.splitlines(), exact)) >= 30, precision


def test_from_python(trained):
    translator = Translator(str(trained), beam=2, nbest=2, cpu=True)
    found = translator.translate_nbest(["We see.", ""])
    assert translator.translate("We see.") == found[0][0].text
    assert translator.translate(["We see.", ""]) == [found[0][0].text, ""] and translator.translate([]) == []
    assert Translator([trained], beam=2, nbest=2, cpu=True).translate_nbest(["We see."]) == found[:1]
    assert translator.translate_nbest(line for line in ["We see.", ""]) == found
    with pytest.raises(UsageError, match="sentence 2 has more tokens than the model's 24 positions; split it"):
        translator.translate(["We see.", "We see. " * POSITIONS])
    with pytest.raises(UsageError, match="takes a list of strings"):
        translator.translate_nbest("We see.")
    for lines, kind in ((b"We see.", "int"), ([b"We see."], "bytes"), (["We see.", None], "NoneType")):
        with pytest.raises(UsageError, match=f"is of type {kind}; it must be a string"):
            translator.translate(lines)
    for name, value in (("batch_size", 0), ("max_tokens", "4"), ("nbest", 0), ("parallel", 0), ("beam", 0)):
        with pytest.raises(UsageError, match=f"{name} must be a whole number of at least 1"):
            Translator([trained], **{name: value})
    with pytest.raises(UsageError, match=r"unknown precision fp16 \(did you mean bf16\?\); choose from fp32"):
        Translator([trained], precision="fp16")
    with pytest.raises(UsageError, match="Translator requires a model"):
        Translator([])
    with pytest.raises(UsageError, match=r"unknown search option len_pen \(did you mean lenpen\?\); choose from"):
        Translator([find_bundle(str(trained))], len_pen=1)
    assert len(found[0]) == 2 and found[0][0].score >= found[0][1].score and found[1][0].text == ""


def test_languages_are_those_of_the_data(trained, alone, tmp_path):
    """As binarised data name them; dictionaries name the other one of the language that is given."""
    folder = shutil.copytree(alone, tmp_path / "alone")
    no_languages(folder)
    bundle = find_bundle(str(folder / "averaged.pt"), data=str(trained / "data-bin"))
    task = read_stored(bundle.checkpoint).task
    cases = (({"data": str(trained / "data-bin")}, "en de"), ({"source_lang": "en"}, "en de"))
    cases += (({"target_lang": "en"}, "de en"),)
    for given, languages in cases:
        found = languages_of(find_bundle(str(folder / "averaged.pt"), **given), task)
        assert " ".join(found) == languages, given


def test_a_model_is_not_used_in_its_reverse_direction(trained):
    """Its joint dictionary would take any text."""
    path = str(trained)
    task = read_stored(find_bundle(path).checkpoint).task
    for given in ({"source_lang": "de", "target_lang": "en"}, {"source_lang": "de"}, {"target_lang": "en"}):
        with pytest.raises(UsageError, match=r"averaged.pt translates en to de, not .*; omit -s and -t$"):
            languages_of(find_bundle(path, **given), task)
    assert languages_of(find_bundle(path, source_lang="en", target_lang="de"), task) == ["en", "de"]


@pytest.mark.parametrize("command", ["translate", "package", "export"])
def test_the_languages_have_short_flags(command):
    required = [] if command == "translate" else ["--output", "out"]
    args = main.parse([command, "model", *required, "-s", "de", "-t", "en"])
    assert (args.source_lang, args.target_lang) == ("de", "en")


def test_from_pretrained_finds_the_dictionaries_of_a_recipe(trained):
    model = DeepTransformerModel.from_pretrained(str(trained), "averaged.pt")
    assert model.task.source_dictionary == model.task.load_dictionary(str(trained / "data-bin/dict.en.txt"))


@pytest.fixture(scope="module")
def hub(trained):
    return DeepTransformerModel.from_pretrained(
        str(trained), "averaged.pt", bpe="subword_nmt", bpe_codes=str(trained / "text/bpe/code"), tokenizer="moses"
    )


def test_the_hub_translates_as_translate_does(hub, trained):
    """Also empty sentences, and those that are skipped as too long."""
    lines = (trained / "text/raw/test.en").read_text().splitlines()[:5]
    want = Translator(str(trained), beam=3, lenpen=0.8, max_len_a=0, max_len_b=200, cpu=True).translate(lines)
    assert hub.translate(lines, beam=3, lenpen=0.8) == want and hub.translate(lines[0], beam=3, lenpen=0.8) == want[0]
    assert hub.translate("") == hub.translate("  ") == hub.sample("") == "" and hub.translate([]) == []
    mixed = ["", lines[0], "We see " * POSITIONS, lines[1], " "]
    found = hub.translate(mixed, beam=3, lenpen=0.8, skip_invalid_size_inputs=True, verbose=True)
    assert found == ["", want[0], "", want[1], ""]
    assert [len(hypotheses) for hypotheses in hub.generate(map(hub.encode, mixed), skip_invalid_size_inputs=True)] == [
        1, 5, 0, 5, 1
    ]  # fmt: skip


def test_all_arguments_of_the_hub_hold_for_one_sentence(hub):
    tokens, word = hub.encode("We see."), hub.tgt_dict.index("Wir")
    options = {"prefix_allowed_tokens_fn": lambda *_: [word, hub.tgt_dict.eos()], "max_len_b": 3}
    for found in (hub.generate(tokens, 2, **options), hub.generate([tokens], 2, **options)[0]):
        assert {*found[0]["tokens"].tolist()} <= {word, hub.tgt_dict.eos()}
    prefix = {"inference_step_args": {"prefix_tokens": torch.tensor([[word]])}}
    assert hub.generate(tokens, 2, **prefix)[0]["tokens"][0] == word
    assert hub.generate(hub.encode("We see " * POSITIONS), skip_invalid_size_inputs=True) == []
    assert len(hub.generate(tokens, np.int64(4))) == 4 and hub.sample("We see.", beam=2, sampling=True, sampling_topk=2)


@pytest.mark.parametrize("sentence, settings, problem", [
    (None, {}, "a sentence is of type NoneType"), (b"We", {}, "a sentence is of type bytes"),
    ([1], {}, "a sentence is of type int"), ("We see " * POSITIONS, {}, "sentence 1 has .* positions; split it"),
    ("We", {"beam": 0}, r"beam must be .* \(0\)"), ("We", {"beam": "3"}, "beam must be"),
    ("We", {"lenpen": "1"}, r"lenpen must be a number \('1'\)"), ("We", {"temperature": 0}, "temperature must be a"),
    ("We", {"sampling": 1}, "sampling must be True or False"), ("We", {"max_len_b": -1}, "max_len_b must be"),
    ("We", {"constraints": ["Wir"]}, "constraints is not supported .* use fairseq-interactive --constraints"),
    ("We", {"score_reference": True}, "score_reference is not supported"),
    ("We", {"print_alignment": "hard"}, "print_alignment is not supported"),
    ("We", {"sampling_topk": 3}, "sampling_topk requires sampling"),
    ("We", {"lenpan": 1}, r"unknown setting lenpan \(did you mean lenpen\?\)"),
])  # fmt: skip
def test_bad_arguments_of_the_hub_are_one_line(hub, sentence, settings, problem):
    with pytest.raises(UsageError, match=problem):
        hub.translate(sentence, **settings)
    with pytest.raises(UsageError, match="not supported with translation models"):
        hub.score(sentence, **settings)


def damage(name):
    def change(folder):
        (folder / name).write_text("nothing of the kind")

    return change


def other_dictionary(folder):
    (folder / "dict.en.txt").write_text("other 1\n")


def other_dictionaries(folder):
    other_dictionary(folder)
    shutil.copy(folder / "dict.en.txt", folder / "dict.de.txt")


def no_languages(folder):
    import torch

    state = torch.load(folder / "averaged.pt", weights_only=False)
    state["cfg"]["task"]["source_lang"] = state["cfg"]["task"]["target_lang"] = None
    torch.save(state, folder / "averaged.pt")


def holds(*names):
    """The change to a folder of another program's files."""

    def change(folder):
        (folder / "other").mkdir()
        for name in names:
            (folder / "other" / name).write_text("{}")

    return change


def a_pipe_for_a_dictionary(folder):
    (folder / "dict.de.txt").unlink()
    os.mkfifo(folder / "dict.de.txt")


BAD = {
    "a pipe": (a_pipe_for_a_dictionary, ["{model}"], "{parts}/dict.de.txt: must be a regular file; see --data"),
    "no model": (None, ["{here}/nothing"], "{here}/nothing does not exist: give the directory of a recipe, a packaged "
                 "model, or a checkpoint"),
    "no run": (None, ["{here}"], "{here} has none of averaged.pt, checkpoints/checkpoint_best.pt, "
               "checkpoints/checkpoint_last.pt: give the directory of a recipe that has trained, or a checkpoint"),
    "CTranslate2": (holds("config.json", "model.bin"), ["{parts}/other"],
                    "{parts}/other is a CTranslate2 model: load it with the package ctranslate2, or give the model that"
                    " it was exported from (translate and serve: with --engine ctranslate2)"),
    "transformers": (holds("config.json", "model.safetensors", "tokenizer_config.json"), ["{parts}/other"],
                     "{parts}/other is a model of transformers: load it with transformers, convert it with "
                     "fairseq-deep import --from huggingface, or give the model that it was exported from"),
    "text": (None, ["{model}", "{here}/in.txt"], "{here}/in.txt is text, not a model: give text with --input"),
    "an archive": (None, ["{here}/in.txt.tgz"], "{here}/in.txt.tgz is an archive, not a model: unpack it, and give"),
    "compressed text": (None, ["{model}", "{here}/in.txt.gz"], "{here}/in.txt.gz is text, not a model: give text with"),
    "sub-words of another kind": (None, ["{model}", "--bpe-codes", "{here}/spm.model"],
                                  "{here}/spm.model does not fit the source dictionary: "),
    "no merges": (None, ["{model}", "--bpe-codes", "{here}/no"], "{here}/no does not exist: see --bpe-codes"),
    "no folder": (None, ["{model}", "--data", "{here}/no"], "{here}/no does not exist: see --data"),
    "no dictionary": (lambda folder: (folder / "dict.de.txt").unlink(), ["{model}"],
                      "{parts}/dict.de.txt: cannot be read (No such file or directory); see --data"),
    "no dictionary at all": (damage("dict.de.txt"), ["{model}"], "{parts}/dict.de.txt:1: must be a token"),
    "another dictionary": (other_dictionary, ["{model}"],
                           "{model} does not fit {parts}: the checkpoint was trained with another source dict"),
    "other dictionaries": (other_dictionaries, ["{model}"], "{model} does not fit {parts}: "),
    "no checkpoint": (damage("averaged.pt"), ["{model}"], "cannot load {model}: "),
    "merges are missing": (lambda folder: (folder / "code").unlink(), ["{model}"],
                           "{parts} has sub-words, but no merges or SentencePiece model: give --bpe-codes"),
    "not merges": (damage("code"), ["{model}"], "{parts}/code: not a valid file of subword-nmt merges: Error: "),
    "other merges": (lambda folder: (folder / "code").write_text("#version: 0.9\na b\n"), ["{model}"],
                     "{parts}/code has merges of version 0.9; subword-nmt supports 0.1 and 0.2"),
    "no object": (damage("steps.json"), ["{model}"], "{parts}/steps.json: "),
    "no language": (no_languages, ["{model}"], "{model} does not name its languages, and files in {parts} do not"
                    ": give --data DIR, the binarised data, or --source-lang and --target-lang"),
    "several": (None, ["{model}", "--nbest", "2"], "--nbest 2 gives several translations per line: add --json"),
    "too many": (None, ["{model}", "--nbest", "9", "--json"], "--nbest 9 exceeds --beam 4: choose a larger beam"),
    "input": (None, ["{model}", "--input", "{here}/no"], "cannot read {here}/no: No such file"),
    "output": (None, ["{model}", "--output", "{here}/no/out"], "cannot write {here}/no/out: the directory"),
    "onto itself": (None, ["{model}", "--input", "{parts}/code", "--output", "{parts}/code"],
                    "cannot write {parts}/code: it is an input ("),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, alone, translate, tmp_path):
    change, words, message = BAD[name]
    parts = tmp_path / "parts"
    (tmp_path / "in.txt").write_text("We see “it”…\n", encoding="utf-8")
    for name in ("in.txt.gz", "in.txt.tgz"):
        (tmp_path / name).write_bytes(gzip.compress(b"We see.\n"))
    if "{here}/spm.model" in words:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["we see the house", "the house is old"]), model_prefix=str(tmp_path / "spm"),
            vocab_size=20, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    shutil.copytree(alone, parts)
    if change:
        change(parts)
    places = {"here": str(tmp_path), "parts": str(parts), "model": str(parts / "averaged.pt")}
    code, out, err = translate(*(word.format(**places) for word in words), text="We see.\n")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fairseq-deep translate: {message.format(**places)}")


def test_a_model_that_has_diverged_is_one_line(alone, translate, tmp_path):
    """And nothing is left of the output: what fails within the search ends like any bad input."""
    shutil.copytree(alone, tmp_path / "other")
    state = torch.load(tmp_path / "other/averaged.pt", weights_only=False)
    state["model"] = {name: value.float() * float("nan") for name, value in state["model"].items()}
    torch.save(state, tmp_path / "other/averaged.pt")
    code, out, err = translate(tmp_path / "other/averaged.pt", "--output", tmp_path / "out.de", text="We see.\n")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("fairseq-deep translate: ")
    assert not (tmp_path / "out.de").exists()


@pytest.mark.parametrize("change, what", [
    (lambda folder: (folder / "code").write_text("#version: 0.2\nh a\n"), "sub-words"),
    (lambda folder: (folder / "steps.json").write_text(json.dumps({"tokenizer": "none", "lowercase": True})),
     "tokenizer, lowercase"),
])  # fmt: skip
def test_an_ensemble_shares_how_its_text_is_prepared(change, what, alone, translate, tmp_path):
    shutil.copytree(alone, tmp_path / "other")
    change(tmp_path / "other")
    code, _, err = translate(alone / "averaged.pt", tmp_path / "other/averaged.pt", text="We see.\n")
    assert code == 2 and f" and {alone}/averaged.pt prepare text differently ({what}): use models with equal" in err


def test_translations_are_utf_8_whatever_the_locale(alone, trained):
    """As the input is; else a letter that the locale has not ends the output half-way."""
    words = ["fairseq-deep", "translate", alone / "averaged.pt", "--input", trained / "text/raw/test.en"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done, usual = (subprocess.run(words, capture_output=True, env=env) for env in (environment, None))
    assert done.returncode == 0, done.stderr
    assert done.stdout == usual.stdout and "grün".encode() in done.stdout


def test_an_ensemble_of_strangers_is_refused(trained, alone, translate, tmp_path):
    folder = shutil.copytree(alone, tmp_path / "other")
    state = torch.load(folder / "averaged.pt", weights_only=False)
    del state["task_state"]
    torch.save(state, folder / "averaged.pt")
    words = (folder / "dict.en.txt").read_text().splitlines(keepends=True)
    for lang in ("en", "de"):
        (folder / f"dict.{lang}.txt").write_text("".join([words[1], words[0], *words[2:]]))
    code, _, err = translate(trained, folder / "averaged.pt", text="We see.\n")
    problem = f"{tmp_path}/other/dict.en.txt differs from the dictionary of {trained}/averaged.pt"
    assert code == 2 and err.endswith(f"{problem}: use models with equal dictionaries in an ensemble\n")


def test_a_byte_order_mark_is_no_text(trained, translate, tmp_path):
    expected = translate(trained, text="We see.\nWe see.\n")[1]
    assert translate(trained, text="\ufeffWe see.\r\nWe see.\r\n")[1] == expected
    (tmp_path / "in").write_bytes("\ufeffWe see.\r\nWe see.\r\n".encode())
    assert translate(trained, "--input", tmp_path / "in")[1] == expected


def test_text_that_the_model_does_not_know_is_named(trained, translate):
    code, out, err = translate(trained, text="Дом зелёный.\nWe see.\n")
    assert code == 0 and out.count("\n") == 2 and err.count("\n") == 1
    assert re.search(r"warning: (\d+) of \d+ tokens of the text are unknown to the model; check", err)
    assert translate(trained, text="Дом\nWe see the house. We see the house.\n")[2] == ""


def test_compressed_input(trained, translate, tmp_path):
    expected = translate(trained, text="We see.\nThe house is green!\n")[1]
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"We see.\nThe house is green!\n"))
    assert translate(trained, "--input", tmp_path / "in.gz") == (0, expected, "")


def test_what_is_not_utf8_is_named(trained, translate, tmp_path):
    text = "We see.\nWir sähen.\n".encode("latin-1")
    code, out, err = translate(trained, "--line-by-line", text=text)
    assert code == 2 and out.count("\n") == 1
    assert "line 2 of stdin is not UTF-8; decompress it, or convert it with iconv" in err
    (tmp_path / "in").write_bytes(text)
    code, out, err = translate(trained, "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert code == 2 and "is not UTF-8 (line 2)" in err and not (tmp_path / "out").exists()
