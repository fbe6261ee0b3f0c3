"""fairseq's translation task with this package's decoding options and RoBT (``--task deep_translation``)."""

import contextlib
import logging
import math
from dataclasses import dataclass, field

from fairseq import metrics
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_deep.core.decoding import PRECISIONS, decode_in
from fairseq_deep.core.registry import UsageError

from .generator import AlignedGenerator, Generator
from .training.backtranslation import BackTranslator, added

logger = logging.getLogger(__name__)


@dataclass
class DeepTranslationConfig(TranslationConfig):
    """Flags of fairseq's translation task and this package's flags of decoding and back-translation."""

    decode_precision: ChoiceEnum(PRECISIONS) = field(
        default="fp32", metadata={"help": "precision of linear layers when translating on a CPU"}
    )
    decode_compile: bool = field(
        default=False, metadata={"help": "compile decoding steps with torch.compile (compilation takes about a minute)"}
    )
    gnmt_lenpen: bool = field(
        default=False,
        metadata={"help": "divide scores by GNMT's ((5 + length) / 6)^lenpen instead of length^lenpen"},
    )
    robt: bool = field(
        default=False,
        metadata={"help": "RoBT: also train with back-translations from a random language of each batch's targets"},
    )


@register_task("deep_translation", dataclass=DeepTranslationConfig)
class DeepTranslationTask(TranslationTask):
    """Translation task with ``--decode-precision``, ``--decode-compile``, ``--gnmt-lenpen`` and ``--robt``.

    It also decodes with models trained for the task ``translation``.
    """

    back_translate = None

    def build_criterion(self, *args, **options):
        """Build the criterion; training and validation call this.

        Raises:
            UsageError: the data do not fit ``--robt``
        """
        if self.cfg.robt:
            self.back_translate = BackTranslator(self)
        return super().build_criterion(*args, **options)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """Run the passes of a batch and, with ``--robt``, those of its back-translation; the contract is fairseq's."""
        step = super().train_step
        if self.back_translate is None:
            return step(sample, model, criterion, optimizer, update_num, ignore_grad)
        last_pass_synchronises = model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()
        with last_pass_synchronises:
            loss, size, logs = step(sample, model, criterion, optimizer, update_num, ignore_grad)
        other = self.back_translate(model, sample)
        other_loss, other_size, other_logs = step(other, model, criterion, optimizer, update_num, ignore_grad)
        return loss + other_loss, size + other_size, added(logs, other_logs)

    def reduce_metrics(self, logging_outputs, criterion):
        """Aggregate logging outputs; ``robt_loss`` is the loss of the back-translations, in bits per token."""
        super().reduce_metrics(logging_outputs, criterion)
        size = sum(logs.get("robt_sample_size", 0) for logs in logging_outputs)
        if size:
            total = sum(logs["robt_loss"] for logs in logging_outputs)
            metrics.log_scalar("robt_loss", total / size / math.log(2), size, round=3)

    def build_generator(self, models, args, seq_gen_cls=None, **options):
        """Build a generator for decoders in the selected precision; the default class is this package's.

        Raises:
            UsageError: the models are not on a CPU in fp32, steps cannot be compiled, or another option is not
                supported with --gnmt-lenpen
        """
        for model in models:
            self._reduce(model)
            self._compile(model)
        aligned = getattr(args, "print_alignment", None)
        if seq_gen_cls is None:
            seq_gen_cls = AlignedGenerator if aligned else Generator
            if aligned:
                options["extra_gen_cls_kwargs"] = {
                    **(options.get("extra_gen_cls_kwargs") or {}), "print_alignment": aligned
                }
        generator = super().build_generator(models, args, seq_gen_cls=seq_gen_cls, **options)
        if self.cfg.gnmt_lenpen:
            _use_gnmt_lenpen(generator)
        return generator

    def _compile(self, model) -> None:
        if not self.cfg.decode_compile or not getattr(model, "_is_generation_fast", False):
            return
        if not hasattr(model.decoder, "compile_steps"):
            raise UsageError("--decode-compile requires models of this package: omit it")
        if str(self.cfg.decode_precision) == "int8":
            raise UsageError("--decode-compile is not supported with --decode-precision int8: omit one of the two")
        if model.decoder.compiled is None:
            model.decoder.compile_steps(dynamic=True)

    def _reduce(self, model) -> None:
        precision, present = str(self.cfg.decode_precision), getattr(model, "decode_precision", "fp32")
        # fairseq also builds a generator for --eval-bleu, with the model that it is about to train
        if precision == present or not getattr(model, "_is_generation_fast", False):
            return
        if present != "fp32":
            raise UsageError(f"the model is in --decode-precision {present} already: reload the model for {precision}")
        count, encoded, of_encoder = decode_in(model, precision)
        model.decode_precision = precision
        logger.info(f"{count} decoder linear layers in {precision}, {encoded} encoder linear layers in {of_encoder}")


def _use_gnmt_lenpen(generator) -> None:
    if not isinstance(generator, Generator) or not generator.normalize_scores:
        raise UsageError("--gnmt-lenpen requires a search with normalised scores; omit --unnormalized and "
                         "--score-reference, or this flag")  # fmt: skip
    generator.normalize_scores, generator.gnmt_lenpen = False, True
