"""Divergence of training: reports the first value that is not finite, and can rewind to the last checkpoint."""

import logging
import os

import torch
from fairseq import safe_save
from fairseq.safe_exit import OneLineError

logger = logging.getLogger(__name__)

REWINDS = 3
"""Maximum number of consecutive rewinds; the count restarts once training is past the update that diverged."""
CURES = (
    "try a lower --lr, more --warmup-updates or --clip-norm 1; for deep stacks also --deep-init, or "
    "--layer-agg dlcl"
)


class DivergedError(OneLineError, FloatingPointError):
    """A loss or gradient is not finite; the one-line message names the update and the first such value."""


def explain(trainer, samples, error, extra):
    """Return the error that replaces `error` of the current update of `trainer`.

    The forward and backward passes are repeated with the same dropout to find the first value that is not finite.
    """
    update = trainer.get_num_updates() + 1
    reason = str(error).strip().splitlines()[0]
    if "inconsistent" in reason:
        return DivergedError(f"update {update}: {reason}")
    kind = "the loss scale fell to its minimum" if "loss scale" in reason else "the gradient is not finite"
    place = first_not_finite(trainer, samples, extra)
    return DivergedError(f"diverged in update {update}: {kind}; {place}; {CURES}")


def first_not_finite(trainer, samples, extra):
    """Describe the first value that is not finite: a parameter, a module's output, the loss, or a gradient."""
    for name, parameter in trainer.get_model().named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the previous update made {name} infinite"
    found, hooks = [], []

    def look_at(name):
        def gradient(grad):
            if not torch.isfinite(grad).all():
                found.append(f"first the gradient of the output of {name}")

        def output(module, inputs, out):
            for tensor in tensors(out):
                if not torch.isfinite(tensor).all() and not is_mask(tensor):
                    found.append(f"first the output of {name}")
                elif tensor.requires_grad:
                    tensor.register_hook(gradient)

        return output

    modules = [(name, module) for name, module in trainer.get_model().named_modules() if name]
    hooks = [module.register_forward_hook(look_at(name)) for name, module in modules]
    try:
        trainer._set_seed()
        trainer.zero_grad()
        for sample in samples:
            sample, _ = trainer._prepare_sample(sample)
            loss, _, _ = trainer.task.train_step(
                sample, trainer.model, trainer.criterion, trainer.optimizer, trainer.get_num_updates(), **extra
            )
            if not torch.isfinite(loss).all():
                found.append("first the loss")
    finally:
        for hook in hooks:
            hook.remove()
        trainer.zero_grad()
    if not found and trainer.data_parallel_world_size > 1:
        return f"all values of process {trainer.data_parallel_rank} are finite, so another process diverged"
    return found[0] if found else "a second pass over the same batch was finite"


def tensors(output):
    """Return the floating-point tensors in the output of a module."""
    if torch.is_tensor(output):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if not isinstance(output, (list, tuple)):
        return []
    return [found for part in output for found in tensors(part)]


def is_mask(tensor):
    """Return whether the tensor is an attention mask of 0 and -inf."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def step(cfg, trainer, samples):
    """Call `trainer.train_step`; with --on-divergence rewind, divergence rewinds to the last checkpoint.

    The data is not rewound: batches read since that checkpoint are skipped.
    """
    try:
        logging_output = trainer.train_step(samples)
    except DivergedError as error:
        if cfg.on_divergence != "rewind":
            raise
        rewind(cfg, trainer, error)
        return None
    if trainer.get_num_updates() > getattr(trainer, "diverged_at", -1):
        trainer.rewinds = 0
    return logging_output


def rewind(cfg, trainer, error):
    path = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    path = safe_save.to_restore(path, cfg.no_last_checkpoints)
    trainer.rewinds = getattr(trainer, "rewinds", 0) + 1
    trainer.diverged_at = trainer.get_num_updates() + 1
    if not os.path.exists(path):
        raise DivergedError(f"{error}; no checkpoint to rewind to yet: lower --save-interval-updates")
    if trainer.rewinds > REWINDS:
        raise DivergedError(f"{error}; this happened again after {REWINDS} rewinds")
    trainer.load_checkpoint(path)
    update = trainer.get_num_updates()
    logger.warning(f"{error}")
    logger.warning(f"rewound to {path}, update {update}; data read since then is skipped (rewind {trainer.rewinds})")
