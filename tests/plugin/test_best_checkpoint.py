"""Settings that depend on validation, and the checkpoint that a run starts from: none is ignored or inverted."""

import argparse
import re
from types import SimpleNamespace as Settings

import pytest
import torch
from fairseq import safe_metric
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationTask

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.training.evaluation import check_evaluation
from tests.helpers.commands import losses, run, saved, train_command

ONE = ("--max-update", "1", "--lr", "1e-9")
BLEU = ("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 10}', "--best-checkpoint-metric", "bleu")
MAXIMIZE = "--maximize-best-checkpoint-metric"


def check_direction(metric, maximize):
    best = {"best_checkpoint_metric": metric, "maximize_best_checkpoint_metric": maximize}
    cfg = Settings(dataset=Settings(disable_validation=False), checkpoint=Settings(**best), task=Settings())
    safe_metric.check(cfg, Settings(post_validate=None), None)


@pytest.mark.parametrize("maximize, metrics", [
    (True, "bleu en-de:bleu chrf2 n_correct_accuracy acc_and_f1"),
    (False, "loss nll_loss de-en:ppl raw_wer adversarial_loss"),
    (None, "accuracy_error bleu_loss 1-bleu neg_chrf score"),
])  # fmt: skip
def test_known_metrics_have_one_direction_and_others_any(maximize, metrics):
    for metric in metrics.split():
        for given in (True, False):
            if maximize in (given, None):
                check_direction(metric, given)
            else:
                with pytest.raises(safe_metric.MetricError, match=f"--best-checkpoint-metric {metric}"):
                    check_direction(metric, given)


def test_other_metrics_are_found_without_a_change_of_the_training(small, tmp_path):
    plain = run(*train_command(small, tmp_path / "plain", "--max-epoch", "2"))
    flags = ("--best-checkpoint-metric", "accuracy", MAXIMIZE, "--report-accuracy")
    other = run(*train_command(small, tmp_path / "other", "--max-epoch", "2", *flags))
    assert losses(other) == losses(plain)
    two = (*ONE, "--best-checkpoint-metric", "ppl", "--distributed-backend", "gloo")
    assert "done training" in run(*train_command(small, tmp_path / "two", *two), processes=2).text


def test_as_many_of_the_best_checkpoints_are_kept_as_the_flag_says(small, tmp_path):
    """The best ones, and as many where all are equal."""
    worse = ("--lr=-1e-3", "--lr-scheduler", "fixed")  # the loss rises
    run(*train_command(small, tmp_path, *worse, "--max-epoch", "4", "--keep-best-checkpoints", "2"))
    kept = {float(path.stem.rsplit("_", 1)[-1]) for path in tmp_path.glob("checkpoint.best_loss_*.pt")}
    last = saved(tmp_path)["extra_state"]
    assert len(kept) == 2 and min(kept) == pytest.approx(last["best"], abs=2e-3) and max(kept) < last["val_loss"]
    equal = ("--lr", "1e-12", "--max-epoch", "6", "--keep-best-checkpoints", "3", "--no-epoch-checkpoints")
    run(*train_command(small, tmp_path / "equal", *equal))
    assert len(list((tmp_path / "equal").glob("checkpoint.best_loss_*.pt"))) == 3


def test_a_resumed_run_with_another_metric_has_no_best_value(small, tmp_path):
    run(*train_command(small, tmp_path, "--max-update", "4"))
    loss = saved(tmp_path)["extra_state"]
    done = run(*train_command(small, tmp_path, "--max-update", "6", "--best-checkpoint-metric", "ppl"))
    assert saved(tmp_path)["extra_state"]["best"] > 2 * loss["best"]
    assert "the best checkpoint so far is by loss, not ppl" in done.stdout


def test_bleu_of_empty_hypotheses_is_0(small, tmp_path):
    empty = (*BLEU[:2], '{"beam": 1, "max_len_a": 0, "max_len_b": 1, "min_len": 0}', *BLEU[3:], MAXIMIZE)
    done = run(*train_command(small, tmp_path, *ONE, *empty))
    assert re.search(r'"valid_bleu": "0"', done.text)


@pytest.mark.parametrize("start, more", [
    ("--finetune-from-model", ("--ema-fp32", "--bf16")), ("--restore-file", ()), ("resume", ()),
])  # fmt: skip
def test_ema_starts_from_the_weights_of_a_checkpoint_without_ema(small, tmp_path, start, more):
    run(*train_command(small, tmp_path / "old", "--max-update", "6", *more[1:]))
    old = tmp_path / "old/checkpoint_last.pt"
    before = saved(tmp_path / "old")["model"]
    new, flags = (tmp_path / "old", ()) if start == "resume" else (tmp_path / "new", (start, old))
    run(*train_command(small, new, "--max-update", "9", "--store-ema", "--ema-decay", "1", *more, *flags))
    ema = saved(new)["extra_state"]["ema"]
    assert before.keys() == ema.keys() and all(torch.equal(ema[name], value) for name, value in before.items())


def test_the_default_checkpoint_may_be_named_before_it_exists(small, tmp_path):
    flags = ("--restore-file", tmp_path / "checkpoint_last.pt")
    run(*train_command(small, tmp_path, *ONE, *flags))
    (tmp_path / "checkpoint_last.pt").rename(tmp_path / "other.pt")
    done = run(*train_command(small, tmp_path, *ONE, "--restore-file", "other.pt"), check=False)
    assert f"--restore-file other.pt: no such file; give {tmp_path}/other.pt, or omit it" in done.text


def check_bleu(text, **flags):
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
        check_bleu("{}", target_lang="ja_XX")
