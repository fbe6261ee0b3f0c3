"""``--eval-bleu-args`` that no validation can run with are refused before a training begins."""

import argparse

import pytest

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.evaluation import check_evaluation


def check(text, **flags):
    check_evaluation(argparse.Namespace(**{"eval_bleu": True, "eval_bleu_args": text, **flags}))


@pytest.mark.parametrize("text, words", [
    ('{"max_len_b": 0}', "use a higher max_len_b"), ('{"max_len_b": 3, "min_len": 4}', "use a higher max_len_b"),
    ('{"beam": 0}', "beam is too low (0); use 1 or more"), ('{"beam": "4"}', 'beam has the wrong type ("4")'),
    ('{"beam": true}', "beam has the wrong type (true)"), ('{"lenpen": NaN}', "lenpen has the wrong type (NaN)"),
    ('{"baem": 4}', "no such setting (baem) (did you mean beam?)"), ("{beam: 4}", "not JSON ({beam: 4})"),
    ("[4]", "not a JSON object"), ('{"beam": 2, "nbest": 3}', "nbest exceeds beam (3)"),
    ('{"temperature": 0}', "temperature is not positive (0)"),
    ('{"sampling_topk": 3}', "sampling_topk requires sampling"),
    ('{"sampling": true, "match_source_len": true}', "sampling and match_source_len exclude each other"),
    ('{"diverse_beam_groups": 3}', "diverse_beam_groups does not divide beam (3)"),
    ('{"score_reference": true}', "score_reference is not supported during validation"),
])  # fmt: skip
def test_impossible_settings_are_refused(text, words):
    with pytest.raises(UsageError) as refused:
        check(text)
    text = str(refused.value)
    assert text.startswith("--eval-bleu-args: ") and words in text and "\n" not in text


def test_settings_of_no_evaluation_are_not_looked_at():
    check('{"beam": 0}', eval_bleu=False)


@pytest.mark.parametrize("text", [
    None, "{}", '{"beam": 4, "lenpen": 0.6, "max_len_a": 1.2, "max_len_b": 10}', '{"max_len_a": 1, "max_len_b": 0}',
    '{"sampling": true, "sampling_topk": 3, "lenpen": 1}', '{"constraints": null}',
])  # fmt: skip
def test_possible_settings_pass(text):
    check(text)
