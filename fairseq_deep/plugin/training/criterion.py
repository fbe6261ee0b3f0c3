"""``--criterion fused_label_smoothed_cross_entropy``: fairseq's criterion with one copy of the scores, and R-Drop."""

import math
from dataclasses import dataclass, field
from typing import Any

from fairseq import metrics, utils
from fairseq.criterions import label_smoothed_cross_entropy as stock
from fairseq.criterions import register_criterion
from fairseq.models import FairseqDecoder

from fairseq_deep.core.registry import UsageError

from .cross_entropy import SmoothedCrossEntropy
from .rdrop import RDropLoss, doubled


@dataclass
class FusedCriterionConfig(stock.LabelSmoothedCrossEntropyCriterionConfig):
    """fairseq's flags and the flag of R-Drop."""

    rdrop_alpha: float = field(
        default=0.0, metadata={"help": "R-Drop: weight of the divergence between two dropout masks; 0 disables R-Drop"}
    )


def _gives_scores(model: Any) -> bool:
    """Return whether the log softmax of the scores of *model* is its log probabilities."""
    decoder = getattr(model, "decoder", None)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        return False
    own = getattr(type(decoder), "get_normalized_probs_scriptable", None)
    return own is FairseqDecoder.get_normalized_probs_scriptable


@register_criterion("fused_label_smoothed_cross_entropy", dataclass=FusedCriterionConfig)
class LabelSmoothedCrossEntropyCriterion(stock.LabelSmoothedCrossEntropyCriterion):
    """fairseq's ``label_smoothed_cross_entropy`` with less memory and R-Drop.

    The class has fairseq's name, since fairseq resumes a checkpoint only with a criterion of the same class name.
    fairseq's implementation handles models that do not return scores (adaptive softmax) and losses per position.

    Raises:
        UsageError: --rdrop-alpha is negative, or the model returns no scores
    """

    def __init__(
        self, task, sentence_avg, label_smoothing, ignore_prefix_size=0, report_accuracy=False, rdrop_alpha=0.0
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        if not 0 <= rdrop_alpha < math.inf:
            raise UsageError(f"--rdrop-alpha must be a number of at least 0, not {rdrop_alpha}")
        self.rdrop_alpha = rdrop_alpha

    def forward(self, model, sample, reduce=True):
        """Return loss, sample size and logging output; R-Drop applies in training only. The contract is fairseq's."""
        if not (self.rdrop_alpha and model.training and reduce):
            return super().forward(model, sample, reduce)
        if not _gives_scores(model):
            raise UsageError("--rdrop-alpha requires a model that returns scores: omit it")
        twice = doubled(sample)
        net_output = model(**twice["net_input"])
        scores, target = self._scores_and_target(model, net_output, twice)
        accuracy = {}
        if self.report_accuracy:  # of the first copy; the backward pass overwrites the scores
            first = (net_output[0][: len(sample["target"])], *net_output[1:])
            accuracy = dict(zip(("n_correct", "total"), map(utils.item, self.compute_accuracy(model, first, sample))))
        loss, nll, divergence = RDropLoss.apply(scores, target, self.eps, self.padding_idx, self.rdrop_alpha)
        size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logs = {"loss": loss.data, "nll_loss": nll.data / 2, "rdrop_kl": divergence.data, "ntokens": sample["ntokens"],
                "nsentences": sample["target"].size(0), "sample_size": size, **accuracy}  # fmt: skip
        return loss, size, logs

    def compute_loss(self, model, net_output, sample, reduce=True):
        """Return loss and negative log likelihood, summed over *sample*; the contract is fairseq's."""
        if not reduce or not _gives_scores(model):
            return super().compute_loss(model, net_output, sample, reduce)
        scores, target = self._scores_and_target(model, net_output, sample)
        return SmoothedCrossEntropy.apply(scores, target, self.eps, self.padding_idx)

    def _scores_and_target(self, model, net_output, sample):
        """Return scores (N x V) and target (N) of all positions; an ignored prefix becomes padding."""
        scores, target = net_output[0], model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        return scores.reshape(-1, scores.size(-1)), target.reshape(-1)

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Aggregate the logging outputs; the divergence is in bits per token, like the loss."""
        super().reduce_metrics(logging_outputs)
        if any("rdrop_kl" in logs for logs in logging_outputs):
            total = sum(logs.get("rdrop_kl", 0) for logs in logging_outputs)
            size = sum(logs.get("sample_size", 0) for logs in logging_outputs)
            metrics.log_scalar("rdrop_kl", total / size / math.log(2), size, round=4)
