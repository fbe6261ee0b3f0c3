"""Checks for trainer flags that are not supported with this package or on this machine."""

import glob
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.compat import to_restore

from .evaluation import check_evaluation
from .muon import MOMENTUM, NS_STEPS, SCALES, check_options
from .schedule import check_schedule

logger = logging.getLogger(__name__)

PAIRS = ("translation_multi_simple_epoch", "denoising", "multilingual_denoising", "dummy_mt")
"""Tasks of fairseq with sentence pairs that are not translation tasks."""
CRITERIA = ("label_smoothed_cross_entropy", "cross_entropy", "label_smoothed_cross_entropy_with_alignment",
            "adaptive_loss", "composite_loss")  # fmt: skip
"""Criteria of fairseq for translation."""
PRECISIONS = ("fp16", "bf16", "amp")
ALIGNING = "label_smoothed_cross_entropy_with_alignment"


class _Flags:
    """Flags of a command line or of a whole configuration; a missing one is None."""

    def __init__(self, flags: Any):
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flags, name, None)


def check_training(flags: Any) -> None:
    """Check the flags of a training run, and drop ``--init-from`` when the run is resumed.

    Args:
        flags: flags of a command line or of a whole configuration, not of a checkpoint, which may be from another
            machine

    Raises:
        UsageError: a flag is not supported; the message names the flags and the fix
    """
    run = _Flags(flags)
    check_evaluation(flags)
    check_schedule(flags)
    if run.optimizer == "muon":
        usual = {"momentum": MOMENTUM, "ns_steps": NS_STEPS, "scale": SCALES[0]}  # a Hydra configuration may lack them
        check_options(**{name: getattr(flags, f"muon_{name}", value) for name, value in usual.items()})
    for problems in (_of_task, _of_model, _of_optimizer, _of_initial_weights, _of_restored_run, _of_machine):
        for problem in problems(run):
            raise UsageError(problem)
    last = run.init_from and to_restore(run.save_dir, run.no_last_checkpoints or False)
    if last:
        logger.info(f"training resumes from {last}: --init-from is not used")
        flags.init_from = flags.init_from_order = flags.stack_restart_updates = None
    elif run.init_from and not os.path.isfile(run.init_from):
        raise UsageError(f"--init-from {run.init_from}: no such file; correct the path")


def _of_machine(run: Any) -> Iterator[str]:
    """Yield problems of the devices, the backend and the precision."""
    if run.ddp_backend == "fully_sharded":
        yield ("--ddp-backend fully_sharded is not supported by this package: use --ddp-backend pytorch_ddp, "
               "and to save memory --checkpoint-activations or --memory-efficient-fp16")  # fmt: skip
    workers = max(run.distributed_world_size or 1, int(os.environ.get("WORLD_SIZE", 1)))
    if run.ddp_backend == "slowmo" and workers > 1 and find_spec("fairscale") is None:
        yield "--ddp-backend slowmo requires fairscale: install it, or use --ddp-backend pytorch_ddp"
    chosen = [f"--{name}" for name in PRECISIONS if getattr(run, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: use one of them"
    if run.tpu or not run.cpu and torch.cuda.is_available():
        return
    if chosen == ["--fp16"] and not _stay_apart(run):
        yield "--fp16 requires a GPU, but this run has none: use --bf16 or --memory-efficient-fp16, or omit it"
    if run.offload_activations:
        yield "--offload-activations requires a GPU, but this run has none: use --checkpoint-activations"


def _of_task(run: Any) -> Iterator[str]:
    """Yield problems of tasks and criteria of fairseq that do not translate, and of the log's directory."""
    task, criterion = TASK_REGISTRY.get(run.task), CRITERION_REGISTRY.get(run.criterion)
    pairs = task is None or issubclass(task, TranslationTask) and run.task != "translation_lev" or run.task in PAIRS
    if not pairs and task.__module__.startswith("fairseq."):
        yield f"--task {run.task} is not supported with this architecture: use translation or deep_translation"
    if criterion is not None and criterion.__module__.startswith("fairseq.") and run.criterion not in CRITERIA:
        yield (f"--criterion {run.criterion} is not supported with this architecture: use one of "
               f"{', '.join(CRITERIA)}")  # fmt: skip
    if run.tensorboard_logdir:
        try:
            os.makedirs(run.tensorboard_logdir, exist_ok=True)
            with tempfile.TemporaryFile(dir=run.tensorboard_logdir):
                pass
        except OSError as error:
            problem = f"cannot write there ({error.strerror}); use another directory"
            yield f"--tensorboard-logdir {run.tensorboard_logdir}: {problem}"


def check_exact(flags: Any, model: nn.Module) -> None:
    """Reject a communication hook that sends gradients of fp32 weights of *model* in fp16.

    Raises:
        UsageError: the hook is set; the message names the fix
    """
    half = getattr(flags, "fp16", False) or getattr(flags, "bf16", False)
    hook = getattr(flags, "ddp_comm_hook", "none")
    if half and str(hook) == "fp16" and any(isinstance(part, KeepFp32) for part in model.modules()):
        raise UsageError(
            "--ddp-comm-hook fp16 is not supported with this model: its fp32 gradients would overflow in fp16; omit "
            "it, gradients in half precision are sent in half precision anyway"
        )


def check_device(weight: Tensor) -> None:
    """Reject a model in bf16 on a GPU without bf16.

    Args:
        weight: any weight of the model

    Raises:
        UsageError: the GPU does not support bf16; the message names the fix
    """
    # without a GPU, fake tensors may claim to be on one, to count kernels
    on_gpu = weight.is_cuda and torch.cuda.is_available()
    if on_gpu and weight.dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise UsageError("--bf16 is not supported by this GPU with this torch: use --fp16 or --amp")


def _of_model(run: Any) -> Iterator[str]:
    """Yield problems of flags of fairseq's models that would fail with a traceback during training."""
    for side in ("encoder", "decoder"):
        if getattr(run, f"{side}_layers_to_keep"):
            yield (f"--{side}-layers-to-keep requires a trained model: set it when you load the model, "
                   f"--model-overrides \"{{'{side}_layers_to_keep': '0,2'}}\", or use --{side}-layers")  # fmt: skip
        drop = getattr(run, f"{side}_layerdrop")
        if not 0 <= (drop or 0) < 1:
            yield f"--{side}-layerdrop {drop} must be in [0, 1)"
    if run.quant_noise_pq and run.quant_noise_scalar:
        yield "--quant-noise-pq and --quant-noise-scalar exclude each other: omit one of them"
    adaptive, criterion = run.adaptive_softmax_cutoff, run.criterion or ""
    if adaptive and "cross_entropy" in criterion:
        yield f"--adaptive-softmax-cutoff is not supported with --criterion {criterion}: use adaptive_loss"
    if criterion == "adaptive_loss" and not adaptive:
        yield "--criterion adaptive_loss requires --adaptive-softmax-cutoff: add it, or use cross_entropy"
    supervised = run.load_alignments and criterion == ALIGNING
    if run.alignment_layer is not None and not supervised:
        yield (f"--alignment-layer has no effect without --load-alignments and --criterion {ALIGNING}; "
               "add both, or omit it")  # fmt: skip
    data, split = str(run.data or "").split(os.pathsep)[0], run.train_subset or "train"
    if supervised and os.path.isdir(data) and not glob.glob(f"{glob.escape(data)}/{split}.align.*.idx"):
        yield (f"--load-alignments: {data} has no alignments of {split}; "
               "run fairseq-preprocess with --align-suffix")  # fmt: skip


def _stay_apart(run: Any) -> bool:
    """Return whether parameters in fp16 have no flattened fp32 copy."""
    return run.optimizer == "muon" or bool(run.memory_efficient_fp16 or run.fp16_no_flatten_grads)


def _of_optimizer(run: Any) -> Iterator[str]:
    """Yield problems of trainers and rates that require state or parameters of another optimizer."""
    if run.optimizer == "muon" and run.use_bmuf:
        yield "--use-bmuf is not supported with --optimizer muon: use --optimizer adam, or omit --use-bmuf"
    if run.completep_rates and run.optimizer not in ("fused_adam", "muon"):
        yield "--completep-rates requires --optimizer fused_adam or muon: use one of them, or omit it"
    if run.completep_rates and run.fp16 and not _stay_apart(run):
        yield ("--completep-rates requires separate parameters, but --fp16 flattens them: add --fp16-no-flatten-grads, "
               "or use --memory-efficient-fp16")  # fmt: skip


def _of_initial_weights(run: Any) -> Iterator[str]:
    """Yield problems of ``--init-from`` and of a second source of initial weights."""
    restart, end = run.stack_restart_updates, run.max_update
    if run.init_from is None:
        for name in ("init_from_order", "stack_restart_updates"):
            if getattr(run, name) is not None:
                yield f"--{name.replace('_', '-')} requires --init-from: add it, or omit this flag"
        return
    if restart is not None and not 0 <= restart < (end or math.inf):
        limit, cure = f", and less than --max-update {end}" * bool(end), "raise it to 0" if restart < 0 else "lower it"
        yield f"--stack-restart-updates {restart} must be 0 or more{limit}: {cure}"
    for name in ("restore_file", "finetune_from_model", "encoder_embed_path", "decoder_embed_path"):
        if getattr(run, name) not in (None, "checkpoint_last.pt"):
            yield f"--init-from and --{name.replace('_', '-')} both set weights: omit one of them"


def _of_restored_run(run: Any) -> Iterator[str]:
    """Yield a problem if a run would start again from a checkpoint elsewhere, and overwrite its own."""
    given, default = run.restore_file or "checkpoint_last.pt", "checkpoint_last.pt"
    own = os.path.join(run.save_dir or "", default)
    elsewhere = os.path.dirname(os.path.realpath(given)) != os.path.dirname(os.path.realpath(own))
    if given != default and elsewhere and os.path.isfile(own) and not run.no_save:
        yield (f"--restore-file {given} would begin a new run over {own}: to resume, omit --restore-file and all "
               "--reset flags; to begin again, delete it or use another --save-dir")  # fmt: skip
