"""Checks the metric of `--best-checkpoint-metric` before training: validation must produce it, in the right direction.

The metric decides which checkpoint is the best, when `--patience` ends a run, and when `reduce_lr_on_plateau` acts.
"""

import re

import torch
from fairseq.logging import metrics
from fairseq.safe_exit import OneLineError

HIGHER = re.compile(r"bleu|chrf|accuracy|comet|meteor|\b(acc|f1)\b")  # as in fairseq-deep average
LOWER = re.compile(r"loss|ppl|perplexity|error|\b(ter|wer|cer)\b|^1 ?-|\bneg")
NO_RESULTS = {"wpb", "bsz", "wps", "ups", "gnorm", "clip", "lr"}


class MetricError(OneLineError):
    """A metric that validation does not produce, or whose best value would be its worst."""


def check(cfg, task, trainer):
    """Check the settings that depend on the results of validation.

    Raises:
        MetricError: the metric is unknown or has the other direction, or a setting requires validation
    """
    if cfg.dataset.disable_validation:
        used = {
            "--patience": cfg.checkpoint.patience > 0,
            "--keep-best-checkpoints": cfg.checkpoint.keep_best_checkpoints > 0,
            "--lr-scheduler reduce_lr_on_plateau": cfg.lr_scheduler._name == "reduce_lr_on_plateau",
        }
        for flag in filter(used.get, used):
            raise MetricError(f"{flag} is not supported with --disable-validation; omit one of them")
        return
    metric, maximize = cfg.checkpoint.best_checkpoint_metric, cfg.checkpoint.maximize_best_checkpoint_metric
    words = metric.lower().replace("_", " ")
    higher, lower = HIGHER.search(words), LOWER.search(words)
    if higher and not lower and not maximize:
        raise MetricError(
            f"--best-checkpoint-metric {metric} requires --maximize-best-checkpoint-metric: add it; without it, the "
            "worst checkpoint would be the best"
        )
    if lower and not higher and maximize:
        raise MetricError(
            f"--maximize-best-checkpoint-metric is not supported with --best-checkpoint-metric {metric}: omit it, or "
            "name another metric"
        )
    bleu = getattr(cfg.task, "eval_bleu", None)
    if metric == "bleu" and bleu is False:
        raise MetricError("--best-checkpoint-metric bleu requires --eval-bleu: add it, or omit the metric")
    if metric != "loss" and not (metric == "bleu" and bleu) and not hasattr(task, "post_validate"):
        known = results(cfg, task, trainer)
        if known and metric not in known:
            raise MetricError(f"unknown --best-checkpoint-metric {metric}; choose from {', '.join(sorted(known))}")


def results(cfg, task, trainer):
    """Return the names of the results of validation, from its batches up to one that has the metric."""
    valid = trainer.get_valid_iterator(cfg.dataset.valid_subset.split(",")[0])
    known = set()
    trainer.model.eval()
    trainer.criterion.eval()
    with torch.no_grad(), metrics.aggregate(new_root=True) as found:
        for batch in getattr(valid, "frozen_batches", None) or []:
            sample, dummy = trainer._prepare_sample(valid.collate_fn([valid.dataset[index] for index in batch]))
            if dummy:
                continue
            _, _, logs = task.valid_step(sample, trainer.model, trainer.criterion)
            task.reduce_metrics([logs], trainer.get_criterion())
            known = {name for name in found.get_smoothed_values() if not name.startswith("_")} - NO_RESULTS
            if cfg.checkpoint.best_checkpoint_metric in known:  # a metric may need sentences of some kind
                break
    return known
