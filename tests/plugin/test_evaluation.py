"""``--eval-bleu-args`` that no validation can run with are refused before a training begins."""

import argparse

import pytest
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.evaluation import check_evaluation


def check(text, **flags):
    check_evaluation(argparse.Namespace(**{"eval_bleu": True, "eval_bleu_args": text, **flags}))


@pytest.mark.parametrize("text, words", [
    ('{"max_len_b": 0}', "use a higher max_len_b"), ('{"max_len_b": 3, "min_len": 4}', "use a higher max_len_b"),
    ('{"beam": 0}', "beam is too low (0); use 1 or more"), ('{"beam": "4"}', 'beam has the wrong type ("4")'),
    ('{"beam": true}', "beam has the wrong type (true)"), ('{"lenpen": NaN}', "lenpen has the wrong type (NaN)"),
    ('{"baem": 4}', "unknown setting (baem) (did you mean beam?)"), ("{beam: 4}", "not JSON ({beam: 4})"),
    ("[4]", "not a JSON object"), ('{"beam": 2, "nbest": 3}', "nbest exceeds beam (3)"),
    ('{"temperature": 0}', "temperature is not positive (0)"),
    ('{"sampling_topk": 3}', "sampling_topk requires sampling"),
    ('{"sampling": true, "match_source_len": true}', "sampling and match_source_len exclude each other"),
    ('{"diverse_beam_groups": 3}', "diverse_beam_groups does not divide beam (3)"),
    ('{"max_len_a": Infinity}', "max_len_a has the wrong type (Infinity)"), ("[" * 100_000, "not JSON"),
    ('{"max_len_b": ' + "9" * 400 + "}", "max_len_b has the wrong type"),
    ('{"print_alignment": true}', "print_alignment is not supported during validation"),
    ('{"score_reference": true}', "score_reference is not supported during validation"),
])  # fmt: skip
def test_impossible_settings_are_refused(text, words):
    with pytest.raises(UsageError) as refused:
        check(text)
    text = str(refused.value)
    assert text.startswith("--eval-bleu-args: ") and words in text and "\n" not in text


@pytest.mark.parametrize("flags, words", [
    ({"eval_bleu_detok": "nope"}, "--eval-bleu-detok: cannot build nope (KeyError: 'nope'); use one of moses"),
    ({"eval_bleu_detok": "moses", "eval_bleu_detok_args": '{"tokenizer": "space"}'}, "--eval-bleu-detok: cannot build"),
    ({"eval_bleu_remove_bpe": "zz"}, "--eval-bleu-remove-bpe: unknown kind of sub-words (zz)"),
])  # fmt: skip
def test_text_that_cannot_be_joined_is_refused(flags, words):
    with pytest.raises(UsageError) as refused:
        check("{}", **flags)
    assert words in str(refused.value)


def test_settings_of_no_evaluation_are_not_looked_at():
    check('{"beam": 0}', eval_bleu=False)


@pytest.mark.parametrize("text", [
    None, "{}", '{"beam": 4, "lenpen": 0.6, "max_len_a": 1.2, "max_len_b": 10}', '{"max_len_a": 1, "max_len_b": 0}',
    '{"sampling": true, "sampling_topk": 3, "lenpen": 1}', '{"constraints": null}',
])  # fmt: skip
def test_possible_settings_pass(text):
    check(text)
    check(text, eval_bleu_detok="moses", eval_bleu_detok_args='{"moses_target_lang": "de"}', eval_bleu_remove_bpe="@@ ")


@pytest.mark.parametrize("lang, tokenized, score", [("zh_CN", False, 100), ("zho_Hans", False, 100), ("th", False, 100),
                                                    ("de", False, 0), ("zh", True, 0)])  # fmt: skip
def test_the_tokenizer_is_that_of_the_target_language(lang, tokenized, score):
    """A perfect translation without blanks between its words."""
    dictionary = Dictionary()
    target = dictionary.encode_line("\u6211\u4eec\u4eca\u5929\u53bb\u5b66\u6821")[None].long()
    task = TranslationTask(
        argparse.Namespace(target_lang=lang, eval_bleu_remove_bpe=None, eval_bleu_print_samples=False,
                           eval_tokenized_bleu=tokenized), dictionary, dictionary,
    )  # fmt: skip
    task.tokenizer = None
    task.inference_step = lambda generator, models, sample, prefix_tokens: [[{"tokens": sample["target"][0]}]]
    assert task._inference_with_bleu(None, {"target": target}, None).score == pytest.approx(score)


def test_a_tokenizer_that_is_not_installed_is_named_before_training(monkeypatch):
    from sacrebleu import metrics

    def refuse(**options):
        raise RuntimeError("Japanese tokenization requires extra dependencies")

    monkeypatch.setattr(metrics, "BLEU", refuse)
    with pytest.raises(UsageError, match="sacreBLEU requires a tokenizer for 'ja_XX': pip install 'sacrebleu.ja.'"):
        check("{}", target_lang="ja_XX")
