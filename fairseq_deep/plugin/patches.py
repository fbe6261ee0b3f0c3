"""All changes that this package makes to fairseq at run time; ``fairseq-deep doctor --verbose`` prints the table.

Importing the plugin applies them once (:func:`apply`). The source patches that ``third_party/fairseq`` applies when it
builds fairseq are listed there.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import importlib
import sys
from typing import Any, NamedTuple, NoReturn

import torch
from fairseq import options
from fairseq.data import iterators
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer import TransformerModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from fairseq_deep.core.compat import disable_cudnn_attention
from fairseq_deep.core.registry import Registry, UsageError
from fairseq_deep.core.search.choices import forbid_repeats

from .training.by_type import DistributedDataParallelByType, total_norm
from .training.evaluation import inference_with_bleu
from .training.fp16 import FP16Optimizer
from .training.readers import stop_readers
from .training.restart import check_settings, load_checkpoint


class Patch(NamedTuple):
    """One replaced attribute of fairseq.

    Attributes:
        where: the module, or ``module:class``, that has the attribute
        name: the attribute
        replacement: its new value
        reason: the reason for the replacement
    """

    where: str
    name: str
    replacement: Any
    reason: str

    def apply(self) -> None:
        """Replace the attribute."""
        module, _, attribute = self.where.partition(":")
        owner = importlib.import_module(module)
        setattr(getattr(owner, attribute) if attribute else owner, self.name, self.replacement)


_parse = options.parse_args_and_arch


@functools.wraps(_parse)
def parse_args_and_arch(parser: argparse.ArgumentParser, input_args: Any = None, **more: Any) -> Any:
    """Parse like fairseq; our flags with an architecture of fairseq raise an error that names an architecture."""
    stock_error = parser.error

    def error(message: str) -> NoReturn:
        flags = [word for word in message.split() if word.partition("=")[0] in _own_flags()]
        if flags and message.startswith("unrecognized arguments"):
            choice = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            choice.add_argument("--arch", "-a")
            arch = choice.parse_known_args(input_args)[0].arch
            if arch is not None:
                twin = f"deep_{arch}"
                fix = f"--arch {twin}, the same model with our flags" if twin in ARCH_MODEL_REGISTRY else "one of " \
                    "'fairseq-deep archs'"  # fmt: skip
                raise UsageError(f"{flags[0]} requires an architecture of this package: use {fix}")
        stock_error(message)

    parser.error = error
    return _parse(parser, input_args, **more)


def _own_flags() -> set[str]:
    from .models.deep_transformer import add_own_args

    own = argparse.ArgumentParser(add_help=False)
    add_own_args(own)
    return {flag for action in own._actions for flag in action.option_strings}


_stock_ema_init = EMA.__init__


def _ema_init(self, model, config, device=None, skip_keys=None):
    """Copy buffers, such as indices of language tags or BranchNorm's factor, instead of averaging them."""
    # by memory, since names in a state dict are those of files
    buffers = {buffer.data_ptr() for buffer in model.buffers() if buffer.numel()}
    tensors = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    copied = {name for name, value in tensors.items() if value.data_ptr() in buffers}
    _stock_ema_init(self, model, config, device, {*(skip_keys or ()), *copied})


_stock_place, _stock_load = EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict


def _place(self):
    """Return the place in the epoch, with the number of processes that read it."""
    return {**_stock_place(self), "num_shards": self.num_shards}


def _go_to(self, state_dict):
    """Go to a place in an epoch that another number of processes may have read; it counts the batches of one."""
    shards, batches = state_dict.get("num_shards", self.num_shards), state_dict.get("iterations_in_epoch", 0)
    _stock_load(self, {**state_dict, "iterations_in_epoch": batches * shards // self.num_shards})


_stock_iterator = EpochBatchIterator._get_iterator_for_epoch


def _get_iterator(self, epoch, shuffle, fix_batches_to_gpus=False, offset=0):
    """Return the batches of an epoch from *offset* on, with ``--skip-remainder-batch`` without the epoch's last."""
    skips, self.skip_remainder_batch = self.skip_remainder_batch, False
    try:
        batches = _stock_iterator(self, epoch, shuffle, fix_batches_to_gpus, offset)
    finally:
        self.skip_remainder_batch = skips
    return batches if batches is None or not skips else batches.take(len(batches) - 1)


def _group(self, iterable, chunk_size, skip_remainder_batch=False):
    """Group the batches of an epoch from its present place on, which need not be at the start of a group."""
    place = getattr(iterable, "n", 0)
    left, start = len(iterable) - place, -(-place // chunk_size)
    groups = left // chunk_size if skip_remainder_batch else -(-left // chunk_size)
    chunks = iterators._chunk_iterator(iterable, chunk_size, skip_remainder_batch)
    iterators.CountingIterator.__init__(self, chunks, start=start, total=start + groups)
    self.chunk_size = chunk_size
    if skip_remainder_batch:
        iterable.take(place + groups * chunk_size)


def fairseq_options() -> set[str]:
    """Return the settings of fairseq's commands, components and Transformer, which methods cannot have as flags."""
    configs = [config for config in vars(FairseqConfig()).values() if dataclasses.is_dataclass(config)]
    configs += [kind for registry in REGISTRIES.values() for kind in registry["dataclass_registry"].values()]
    configs += TASK_DATACLASS_REGISTRY.values()
    parser = argparse.ArgumentParser(add_help=False)
    TransformerModel.add_args(parser)
    names = {field.name for config in configs if config is not None for field in dataclasses.fields(config)}
    return names | {action.dest for action in parser._actions}


def _all_options() -> set[str]:
    return fairseq_options() | {flag.lstrip("-").replace("-", "_") for flag in _own_flags()}


@torch.jit.unused
def _no_repeat_ngram(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
    """Set *lprobs* (B x V) of tokens that would repeat an n-gram of *tokens* (B x T) to -inf, and return them."""
    forbid_repeats(lprobs, tokens[:, 1 : step + 1].tolist(), self.no_repeat_ngram_size)
    return lprobs


PATCHES = (
    Patch("fairseq.ngram_repeat_block:NGramRepeatBlock", "_no_repeat_ngram", _no_repeat_ngram,
          "--no-repeat-ngram-size blocks nothing on a CPU: fairseq compares with the padding behind a hypothesis"),
    Patch("fairseq.models.distributed_fairseq_model", "LegacyDistributedDataParallel", DistributedDataParallelByType,
          "legacy_ddp reduces gradients of fp32 weights in the type of the first weight"),
    Patch("fairseq.utils", "multi_tensor_total_norm", total_norm,
          "apex's norm reads all gradients in the type of the first"),
    Patch("fairseq.optim", "FP16Optimizer", FP16Optimizer,
          "it copies and zeroes tensors one by one; fused_adam and muon use one launch, and muon unflattened matrices"),
    Patch("fairseq.options", "parse_args_and_arch", parse_args_and_arch,
          "our flags with an architecture of fairseq raise an error that names one of ours, such as its deep_ twin"),
    Patch("fairseq.models.transformer:TransformerModel", "check_settings", staticmethod(check_settings),
          "fairseq loads weights into a model with the same shapes that computes another function"),
    Patch("fairseq.models.ema.ema:EMA", "__init__", _ema_init,
          "--store-ema averages buffers: it fails with indices of language tags, and BranchNorm's factor lags behind"),
    Patch("fairseq.data.iterators:GroupedIterator", "__init__", _group,
          "a run that resumes in an epoch with another --update-freq begins this epoch again at its end"),
    Patch("fairseq.data.iterators:EpochBatchIterator", "state_dict", _place,
          "checkpoints do not store how many processes read the data"),
    Patch("fairseq.data.iterators:EpochBatchIterator", "load_state_dict", _go_to,
          "a run that resumes with more processes skips data, with fewer it repeats data"),
    Patch("fairseq.data.iterators:EpochBatchIterator", "_get_iterator_for_epoch", _get_iterator,
          "a run that resumes in an epoch with --skip-remainder-batch skips most of it"),
    Patch("fairseq.tasks.translation:TranslationTask", "_inference_with_bleu", inference_with_bleu,
          "--eval-bleu uses sacreBLEU's 13a for all languages, which gives Chinese a BLEU of 0"),
    Patch("fairseq.trainer:Trainer", "load_checkpoint", load_checkpoint,
          "a new run with --stack-restart-updates begins in the middle of its schedule; the optimizer state of "
          "another model raises an error that names the fix"),
)  # fmt: skip
OTHERS = {
    "atexit": "fairseq's prefetching threads are stopped at exit; otherwise the process may abort after the last save",
    "sys.excepthook": "another fairseq than ours: our errors are one line, without a traceback",
    "torch.backends.cuda.enable_cudnn_sdp": "off: cuDNN's attention prepares a plan for each shape of a batch",
}
"""What :func:`apply` changes besides the patches, with reasons."""


def report_on_one_line() -> None:
    """Print exceptions with a ``one_line`` without a traceback, unless the commands of this fairseq do."""
    try:
        from fairseq import safe_exit  # noqa: F401
    except ImportError:
        before = sys.excepthook

        def report(kind, error, trace):
            print(error.one_line, file=sys.stderr) if hasattr(error, "one_line") else before(kind, error, trace)

        sys.excepthook = report


def apply() -> None:
    """Apply all patches, choose torch's own attention kernels, and register the exit hook."""
    disable_cudnn_attention()
    Registry.taken = staticmethod(_all_options)
    report_on_one_line()
    for patch in PATCHES:
        patch.apply()
    atexit.register(stop_readers)
