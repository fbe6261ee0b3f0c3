"""A training whose numbers are no longer finite: where that began, in one line, and the way back to a checkpoint."""

import logging
import os

import torch
from fairseq import safe_save
from fairseq.safe_exit import OneLineError

logger = logging.getLogger(__name__)

REWINDS = 3
"""Times that a training goes back before it gives up; reaching the update where it diverged starts anew."""
CURES = (
    "try a lower --lr, more --warmup-updates or --clip-norm 1; for deep stacks an initialisation made for them "
    "(--deep-init) or another way to connect layers (--layer-agg dlcl)"
)


class DivergedError(OneLineError, FloatingPointError):
    """What is not finite, and since when; the message is one line."""


def explain(trainer, samples, error, extra):
    """The error to raise instead of `error`, which came up in the present update of `trainer`.

    The forward and backward pass are made once more, with the same dropout, and every output is looked at.
    """
    update = trainer.get_num_updates() + 1
    reason = str(error).strip().splitlines()[0]
    if "inconsistent" in reason:
        return DivergedError(f"update {update}: {reason}")
    kind = "the loss scale fell to its minimum" if "loss scale" in reason else "the gradient is not finite"
    place = first_not_finite(trainer, samples, extra)
    return DivergedError(f"diverged in update {update}: {kind}; {place}; {CURES}")


def first_not_finite(trainer, samples, extra):
    """What is not finite first: a parameter, the output of a module, the loss, or the gradient of an output."""
    for name, parameter in trainer.get_model().named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the update before it made {name} infinite"
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
        return f"process {trainer.data_parallel_rank} computed nothing that is not, so it began in another"
    return found[0] if found else "a second pass over the same batch was finite"


def tensors(output):
    """The tensors with fractions in what a module returns."""
    if torch.is_tensor(output):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if not isinstance(output, (list, tuple)):
        return []
    return [found for part in output for found in tensors(part)]


def is_mask(tensor):
    """Whether it is infinite on purpose: zeros, and -inf for what is not to be attended to."""
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def step(cfg, trainer, samples):
    """`trainer.train_step`; with --on-divergence rewind, what diverges goes back to the last checkpoint.

    The data is not gone back: what was read since then is left out.
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
        raise DivergedError(f"{error}; there is no checkpoint to go back to yet (--save-interval-updates)")
    if trainer.rewinds > REWINDS:
        raise DivergedError(f"{error}; it did so after {REWINDS} rewinds, too")
    trainer.load_checkpoint(path)
    update = trainer.get_num_updates()
    logger.warning(f"{error}")
    logger.warning(f"went back to {path}, update {update}; the data read since then is left out ({trainer.rewinds})")
