"""Records from elsewhere: a schema's checks against its words, every reader's one line, and files changed at random."""

import contextlib
import json
import math
import random
import re

import pytest

from fairseq_deep.cli import main
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import record
from fairseq_deep.runtime import records
from tests.helpers.fuzz import TIMES
from tests.helpers.runs import GENERATED, LOGS, RECORD, make_run

NESTED = "[" * 100_000
LOGGED, _, VALID = LOGS
SUMMARY = {"bleu": {"mean": 12.3, "std": 0.5, "min": 12, "max": 13}, "seeds": [1], "failed": [3], "signature": "x",
           "runs": {"1": RECORD}}  # fmt: skip


@pytest.mark.parametrize("content, schema, words", [  # what no test of a command has
    ("NaN", records.figure, ""),
    ("1e999", records.number(0, math.inf), "is inf, not a number"),
    (f"{1 << 53}", records.number(0, 1 << 60), "not a number from"),
    (f"{10**400}", records.figure, "not a number"),
    ("4.0", records.whole(1, 9), "the content is 4.0, not a whole number"),
    ('"1_0"', records.numeral, "is '1_0', not a number"),
    ('"3.27339e+150"', records.numeral, ""),
    ('"inf"', records.count, "is 'inf', not a number of at least 0"),
    ('{"a": true, "b": 1}', {"a": records.truth}, ""),
    ("{}", records.exactly({"a": records.truth}), "a is missing"),
    ('{"a": %s}' % ("[" * 49 + "]" * 49), {}, ""),
    ('{"a": %s}' % ("[" * 50 + "]" * 50), {}, "nested more than 50 levels deep"),
    ('{"a": 1, "a": 1}', {}, "a name is repeated in one object"),
    ('{"\\udfff": 1}', {}, "half of a surrogate pair"),
    ("9" * 5000, records.count, "not valid JSON: Exceeds the limit (4300 digits)"),
    ("\ufeff{}", {}, "not valid JSON"),
    ('{"a": "\udcff"}', {}, "x.json: must be UTF-8"),
], ids=range(17))  # fmt: skip
def test_a_schema_refuses_what_its_words_say(content, schema, words, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError) if words else contextlib.nullcontext() as found:
        records.read_json(str(path), schema, "delete it")
    assert not words or words in found.value.message and found.value.message.endswith("; delete it")


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
    "text/bpe/steps.json": ('{"tokenizer": "moses", "lowercase": false}', [SOURCE]),
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
