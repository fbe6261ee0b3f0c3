"""Records from elsewhere: a schema's checks against its words, every reader's one line, and files changed at random."""

import json
import math
import os
import random
import re

import pytest

from fairseq_deep.cli import main
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import record
from fairseq_deep.runtime import records
from fairseq_deep.runtime.files import read_text
from tests.helpers.fuzz import TIMES
from tests.helpers.runs import GENERATED, RECORD, make_run

NESTED = "[" * 100_000
STEPS = {"tokenizer": "moses", "lowercase": False}
LOGGED = {"kind": "train_inner", "time": 5.0, "session": 1, "loss": "9.5", "ppl": "724", "num_updates": "10"}
VALID = {"kind": "valid", "time": 9, "session": 1, "epoch": 1, "valid_loss": "9", "valid_ppl": "7",
         "valid_num_updates": "10"}  # fmt: skip
SUMMARY = {"bleu": {"mean": 12.3, "std": 0.5, "min": 12, "max": 13}, "seeds": [1], "failed": [3], "signature": "x",
           "runs": {"1": RECORD}}  # fmt: skip


def refusal(read, *arguments):
    """The error of ``read(*arguments)``; empty without one."""
    try:
        read(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value, schema, words", [
    (4, records.whole(1, 9), ""),
    (True, records.whole(0, 9), "the content is True, not a whole number from 0 to 9"),
    (4.0, records.whole(1, 9), "the content is 4.0, not a whole number"),
    (0, records.number(0, 1), ""),
    (math.nan, records.number(0, 1), "is nan, not a number from 0 to 1"),
    (1e999, records.number(0, math.inf), "is inf, not a number"),
    (1 << 53, records.number(0, 1 << 60), "not a number from"),
    (math.nan, records.figure, ""),
    (1e300, records.figure, ""),
    (10**400, records.figure, "not a number"),
    ("nan", records.numeral, ""),
    ("3.27339e+150", records.numeral, ""),
    ("1_0", records.numeral, "is '1_0', not a number"),
    ("9" * 5000, records.numeral, "not a number"),
    ("10", records.count, ""),
    ("inf", records.count, "is 'inf', not a number of at least 0"),
    ("a\nb", records.line, "not one line of text"),
    (None, records.optional(records.truth), ""),
    (0, records.optional(records.truth), "not true or false or null"),
    ("no", records.truth, "is 'no', not true or false"),
    ([], records.one_of("a", "b"), "is a list, not one of a, b"),
    ({"a": [1, "x"]}, {"a": [records.amount]}, "a[2] is 'x', not a whole number"),
    ({"a": 1}, {"a": [records.amount]}, "a is 1, not a list"),
    ({"b": 1}, {"a": records.truth}, ""),
    ({"b": 1}, {"a": records.needed(records.truth)}, "a is missing"),
    ({"b": {"c": 1}}, {"*": {"*": records.truth}}, "b.c is 1, not true"),
    ({"a": True, "b": 1}, records.exactly({"a": records.truth}), "the content has the unknown setting 'b'"),
    ({}, records.exactly({"a": records.truth}), "a is missing"),
    ([], {}, "the content is a list, not an object"),
])  # fmt: skip
def test_a_schema_refuses_what_its_words_say(value, schema, words):
    found = refusal(records.check, value, schema)
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize("text, words", [
    ('{"a": {"b": [1, {"c": NaN}]}}', ""),
    ("[" * 49 + "]" * 49, ""),
    ("[" * 51 + "]" * 51, "nested more than 50 levels deep"),
    (NESTED, "nested more than 50 levels deep"),
    ('{"a": 1, "a": 1}', "a name is repeated in one object"),
    ('["\\ud800"]', "half of a surrogate pair"),
    ('{"\\udfff": 1}', "half of a surrogate pair"),
    ("9" * 5000, "not valid JSON: Exceeds the limit (4300 digits)"),
    ("{", "not valid JSON"),
    ("\ufeff{}", "not valid JSON"),
])  # fmt: skip
def test_json_that_no_record_has(text, words):
    found = refusal(records.parse, text)
    assert words in found and bool(words) == bool(found) and len(found) < 200


def test_files_that_are_none(tmp_path):
    path = tmp_path / "x.json"
    assert records.read_json(str(path), {}, "x") == {} == records.read_json(str(path / "y"), {}, "x")
    os.mkfifo(path)
    with pytest.raises(UsageError, match="must be a regular file"):
        records.read_json(str(path), {}, "x")
    path.unlink()
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UsageError, match="x.json: must be UTF-8"):
        records.read_json(str(path), {}, "x")
    with pytest.raises(UsageError, match="x.json: must have at most 5 bytes; delete it"):
        read_text(str(path), "delete it", 5)


def test_torn_lines_are_skipped_and_wrong_ones_named(tmp_path):
    path = tmp_path / "train.jsonl"
    unmeasured = {**LOGGED, "ratio_enc": None, "ratio_dec": None}  # as fairseq logs an interval without a value
    lines = [json.dumps(LOGGED), '{"kind": "tr', NESTED, "", json.dumps(unmeasured), json.dumps(VALID), '{"kind']
    path.write_text("\n".join(lines))
    assert list(records.read_json_lines(str(path), records.TRAINED)) == [LOGGED, unmeasured, VALID]
    path.write_text("\n".join([*lines, json.dumps({**VALID, "valid_ppl": "many"})]))
    with pytest.raises(UsageError, match=":8: valid_ppl is 'many', not a number; remove the line"):
        list(records.read_json_lines(str(path), records.TRAINED))


TOKEN = re.compile(r'"[^"\n]*"|[-+\w.]+|\s|.')
ODD = ["", "null", "true", "[]", "{}", '["x"]', '{"a": 1}', "1e308", "-1", "9" * 5000, "nan", '"nan"', '"\\ud800"', "²",
       "\t", "\n", "\x00", "\u2028", "\x1b[2J", "<b>", "A-1\t9-9", '"', "{", NESTED]  # fmt: skip


def spoiled(text, rng):
    """The *text* of a record with one to three tokens replaced."""
    tokens = TOKEN.findall(text)
    for _ in range(rng.randint(1, 3)):
        tokens[rng.randrange(len(tokens))] = rng.choice(ODD)
    return "".join(tokens)


SOURCE = "translate {run} --cpu --input {run}/nothing"
READERS = {
    "RESULT.json": (json.dumps(RECORD), ["report {run}", SOURCE]),
    "seeds/RESULT.json": (json.dumps(SUMMARY), ["report {run}/seeds"]),
    "text/bpe/steps.json": (json.dumps(STEPS), [SOURCE]),
    "train.jsonl": (f"{json.dumps(LOGGED)}\n{json.dumps(VALID)}\n",
                    ["report {run}", "plot run {run}/train.jsonl --output {run}/a.svg"]),
    "generate-test.txt": (GENERATED, ["score --generate-output {run}/generate-test.txt",
                                      "report {run} --generate-output {run}/generate-test.txt"]),
}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("name", READERS)
def test_a_record_that_is_changed_at_random_is_read_or_refused_in_one_line(name, tmp_path, capsys):
    run, rng = make_run(tmp_path / "run"), random.Random(5)
    (run / "averaged.pt").touch()
    (run / "data-bin").mkdir()
    (run / "text/bpe").mkdir()
    make_run(run / "seeds/seed1")
    text, commands = READERS[name]
    for _ in range(8 * TIMES):
        (run / name).write_text(spoiled(text, rng), encoding="utf-8", errors="surrogatepass")
        for command in commands:
            code = main([word.format(run=run) for word in command.split()])
            printed = capsys.readouterr()
            assert code in (0, 2) and (code == 0 or printed.err[:-1].isprintable()), printed.err


def test_a_comparison_of_many_pairs_is_no_paired_bootstrap(tmp_path):
    """It has pairs and no measures; its page ended in a traceback."""
    against = {"system": "exp/other", "pairs": {"en-de": 9.5}}
    record = {**RECORD, "scores": {"test": {"sacrebleu": {"bleu": 12.3, "against": against}}}}
    assert main(["report", str(make_run(tmp_path / "run", record))]) == 0


@pytest.mark.filterwarnings("error")
def test_a_diverged_training_is_drawn(tmp_path, capsys):
    """fairseq logs a perplexity of 2^loss: matplotlib fails near the largest double, and draws no infinity."""
    run = make_run(tmp_path / "run", {**RECORD, "valid_ppl": 1.7e308})
    worse = {**LOGGED, "num_updates": "20", "loss": "500", "ppl": "3.27339e+150", "gnorm": "1.7e308"}
    valid = {**VALID, "valid_loss": "1000", "valid_ppl": "1.07151e+301"}
    (run / "train.jsonl").write_text("\n".join(map(json.dumps, (LOGGED, worse, valid))))
    assert main(["plot", "run", str(run), "--output", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]) == 0
    assert "1.07e+301" in capsys.readouterr().out and ",ppl,20,3.27339e+150" in (tmp_path / "a.csv").read_text()
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("name, text, words", [
    ("train.jsonl", json.dumps({**VALID, "valid_ppl": []}), "train.jsonl:1: valid_ppl is a list, not a number"),
    ("score-test.json", '{"bleu": "9"}', "score-test.json: bleu is '9', not a number; delete it, then run the same"),
    ("text/raw/data.json", '{"sets": {"train": {}}}', "data.json: sets.train.pairs is missing"),
])  # fmt: skip
def test_a_recipe_ends_with_one_line_too(name, text, words, tmp_path):
    (tmp_path / "text/raw").mkdir(parents=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as found:
        record.training_facts(str(tmp_path))
        record.read_scores(str(tmp_path), "test")
        record.read_data(str(tmp_path))
    assert words in str(found.value)
