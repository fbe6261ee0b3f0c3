"""Checks for trainer flags that are not supported with this package or on this machine."""

import glob
import logging
import math
import os
import tempfile
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


def check_training(flags: Any) -> None:
    """Check the flags of a training run.

    Args:
        flags: flags of a command line or of a whole configuration, not of a checkpoint, which may be from another
            machine

    Raises:
        UsageError: a flag is not supported; the message names the flags and the fix
    """
    _check_backend(flags)
    _check_task(flags)
    _check_logdir(getattr(flags, "tensorboard_logdir", None))
    check_evaluation(flags)
    check_schedule(flags)
    _check_model(flags)
    _check_muon(flags)
    _check_rates(flags)
    _check_init_from(flags)
    chosen = [f"--{name}" for name in PRECISIONS if getattr(flags, name, False)]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other: use one of them")
    on_cpu = getattr(flags, "cpu", False) or not torch.cuda.is_available()
    if on_cpu and not getattr(flags, "tpu", False):
        if chosen == ["--fp16"]:
            _check_fp16_on_cpu(flags)
        if getattr(flags, "offload_activations", False):
            raise UsageError("--offload-activations requires a GPU, but this run has none: "
                             "use --checkpoint-activations")  # fmt: skip


def _check_task(flags: Any) -> None:
    """Reject tasks and criteria of fairseq for other data or models than sentence pairs and their translation."""
    name = getattr(flags, "task", None)
    task, criterion = TASK_REGISTRY.get(name), CRITERION_REGISTRY.get(getattr(flags, "criterion", None))
    pairs = task is None or issubclass(task, TranslationTask) and name != "translation_lev" or name in PAIRS
    if not pairs and task.__module__.startswith("fairseq."):
        raise UsageError(f"--task {name} is not supported with this architecture: use translation or deep_translation")
    if criterion is not None and criterion.__module__.startswith("fairseq.") and flags.criterion not in CRITERIA:
        raise UsageError(f"--criterion {flags.criterion} is not supported with this architecture: use one of "
                         f"{', '.join(CRITERIA)}")  # fmt: skip


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


def _check_model(flags: Any) -> None:
    """Reject flags of fairseq's models that would fail with a traceback during training."""
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        if getattr(flags, name, None):
            raise UsageError(
                f"--{name.replace('_', '-')} requires a trained model: set it when you load the model, "
                f"--model-overrides \"{{'{name}': '0,2'}}\", or use --{name[:7]}-layers"
            )
    adaptive, criterion = getattr(flags, "adaptive_softmax_cutoff", None), getattr(flags, "criterion", None) or ""
    if adaptive and "cross_entropy" in criterion:
        raise UsageError(f"--adaptive-softmax-cutoff is not supported with --criterion {criterion}: use adaptive_loss")
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if not 0 <= (getattr(flags, name, None) or 0) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(flags, name)} must be in [0, 1)")
    _check_alignments(flags, criterion)
    if criterion == "adaptive_loss" and not adaptive:
        raise UsageError("--criterion adaptive_loss requires --adaptive-softmax-cutoff: add it, or use cross_entropy")


def _stay_apart(flags: Any) -> bool:
    """Return whether parameters in fp16 have no flattened fp32 copy."""
    names = ("memory_efficient_fp16", "fp16_no_flatten_grads")
    return getattr(flags, "optimizer", None) == "muon" or any(getattr(flags, name, False) for name in names)


def _check_muon(flags: Any) -> None:
    """Reject options of Muon that are out of range, and trainers that average only the state of Adam."""
    if getattr(flags, "optimizer", None) != "muon":
        return
    usual = {"momentum": MOMENTUM, "ns_steps": NS_STEPS, "scale": SCALES[0]}  # a Hydra configuration may lack them
    check_options(**{name: getattr(flags, f"muon_{name}", value) for name, value in usual.items()})
    if getattr(flags, "use_bmuf", False):
        raise UsageError("--use-bmuf is not supported with --optimizer muon: use --optimizer adam, or omit --use-bmuf")


def _check_rates(flags: Any) -> None:
    """Reject learning rates per layer if the optimizer does not have the layers' parameters."""
    if not getattr(flags, "completep_rates", False):
        return
    if getattr(flags, "optimizer", None) not in ("fused_adam", "muon"):
        raise UsageError("--completep-rates requires --optimizer fused_adam or muon: use one of them, or omit it")
    if getattr(flags, "fp16", False) and not _stay_apart(flags):
        raise UsageError(
            "--completep-rates requires separate parameters, but --fp16 flattens them: add --fp16-no-flatten-grads, "
            "or use --memory-efficient-fp16"
        )


def _check_alignments(flags: Any, criterion: str) -> None:
    """Reject supervised alignments without the flags that use them."""
    supervised = getattr(flags, "load_alignments", False) and criterion == ALIGNING
    if getattr(flags, "alignment_layer", None) is not None and not supervised:
        raise UsageError(f"--alignment-layer has no effect without --load-alignments and --criterion {ALIGNING}; "
                         "add both, or omit it")  # fmt: skip
    data = str(getattr(flags, "data", None) or "").split(os.pathsep)[0]
    split = getattr(flags, "train_subset", None) or "train"
    if supervised and os.path.isdir(data) and not glob.glob(f"{glob.escape(data)}/{split}.align.*.idx"):
        raise UsageError(f"--load-alignments: {data} has no alignments of {split}; "
                         "run fairseq-preprocess with --align-suffix")  # fmt: skip


def _check_init_from(flags: Any) -> None:
    """Reject a second source of initial weights; drop ``--init-from`` when the run is resumed."""
    path, restart = getattr(flags, "init_from", None), getattr(flags, "stack_restart_updates", None)
    if path is None:
        for name in ("init_from_order", "stack_restart_updates"):
            if getattr(flags, name, None) is not None:
                raise UsageError(f"--{name.replace('_', '-')} requires --init-from: add it, or omit this flag")
        return
    end = getattr(flags, "max_update", None)
    if restart is not None and not 0 <= restart < (end or math.inf):
        limit = f", and less than --max-update {end}" * bool(end)
        cure = "raise it to 0" if restart < 0 else "lower it"
        raise UsageError(f"--stack-restart-updates {restart} must be 0 or more{limit}: {cure}")
    others = {"restore_file": "checkpoint_last.pt", "finetune_from_model": None, "encoder_embed_path": None}
    for name, usual in {**others, "decoder_embed_path": None}.items():
        if getattr(flags, name, usual) != usual:
            raise UsageError(f"--init-from and --{name.replace('_', '-')} both set weights: omit one of them")
    last = to_restore(flags.save_dir, getattr(flags, "no_last_checkpoints", False))
    if last:
        logger.info(f"training resumes from {last}: --init-from is not used")
        flags.init_from = flags.init_from_order = flags.stack_restart_updates = None
    elif not os.path.isfile(path):
        raise UsageError(f"--init-from {path}: no such file; correct the path")


def _check_backend(flags: Any) -> None:
    backend = getattr(flags, "ddp_backend", None)
    if backend == "fully_sharded":
        raise UsageError(
            "--ddp-backend fully_sharded is not supported by this package: use --ddp-backend pytorch_ddp, "
            "and to save memory --checkpoint-activations or --memory-efficient-fp16"
        )
    workers = max(getattr(flags, "distributed_world_size", None) or 1, int(os.environ.get("WORLD_SIZE", 1)))
    if backend == "slowmo" and workers > 1 and find_spec("fairscale") is None:
        raise UsageError("--ddp-backend slowmo requires fairscale: install it, or use --ddp-backend pytorch_ddp")


def _check_logdir(path: str | None) -> None:
    if not path:
        return
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        problem = f"cannot write there ({error.strerror}); use another directory"
        raise UsageError(f"--tensorboard-logdir {path}: {problem}") from error


def _check_fp16_on_cpu(flags: Any) -> None:
    cure = "use --bf16 or --memory-efficient-fp16, or omit it"
    if not half_on_cpu():
        cure = "use --bf16, or omit it"
    elif _stay_apart(flags):
        return
    raise UsageError(f"--fp16 requires a GPU, but this run has none: {cure}")


def half_on_cpu() -> bool:
    """Return whether torch multiplies and normalises in fp16 on a CPU (since about 2.2)."""
    x = torch.ones(1, 1, dtype=torch.float16)
    try:
        nn.functional.layer_norm(nn.functional.linear(x, x).softmax(-1), (1,))
    except RuntimeError:
        return False
    return True
