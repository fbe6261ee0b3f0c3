"""``--eval-bleu-args`` that no validation can run with are refused before a training begins."""

import argparse

import pytest
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.evaluation import check_evaluation


def check(text, **flags):
    check_evaluation(argparse.Namespace(**{"eval_bleu": True, "eval_bleu_args": text, **flags}))


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
