"""Loading a run's checkpoint: ``--stack-restart-updates N``, and errors for other optimizer states or settings.

With the flag, a new run counts its updates from N, so its schedule begins there.

Shallow-to-Deep Training for Neural Machine Translation, Li et al., EMNLP 2020: after each stacking, the released code
resets the optimizer and sets the update number to min(previous number, warm-up). The learning rate then begins at its
peak. ``--max-update`` and checkpoint names use the same update number.

A checkpoint also loads into a model that has the same shapes but computes another function, such as one with another
number of attention heads. :func:`check_settings` compares the descriptions of both models (``core/stack.py``).
"""

import argparse
import functools
import inspect
import logging
from dataclasses import fields
from typing import Any

from fairseq.trainer import Trainer

from fairseq_deep.core.description import describe
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import MethodConfig
from fairseq_deep.errors import printable
from fairseq_deep.plugin.compat import load_checkpoint as fetch
from fairseq_deep.plugin.compat import model_flags
from fairseq_deep.plugin.models.dictionaries import DictionaryState
from fairseq_deep.plugin.models.hydra import fill

logger = logging.getLogger(__name__)


def _arch_of(path: str) -> str:
    flags = model_flags(fetch(path))
    return f"{path} has the architecture {printable(flags.get('arch') or flags.get('_name'))}"


_stock = Trainer.__dict__["load_checkpoint"]


@functools.wraps(_stock)
def load_checkpoint(trainer: Trainer, *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Load a checkpoint; without one, the run is new and its update number starts at the flag's value.

    Raises:
        UsageError: the checkpoint has another architecture, the optimizer state is another model's, such as a stock
            model's for its twin, or the schedule ends before the start
    """
    if isinstance(trainer.task.state, DictionaryState):
        trainer.task.state.turns = bool(arguments[1] if len(arguments) > 1 else options.get("reset_optimizer"))
    try:
        state = _stock(trainer, *arguments, **options)
    except Exception as error:  # fairseq's trainer has no type of its own for another architecture
        if "ensure that the architectures match" in str(error):
            given = getattr(trainer.cfg.model, "arch", None) or trainer.cfg.model._name
            raise UsageError(
                f"{_arch_of(arguments[0])}, and --arch is {given}, with other weights: give the --arch and the flags "
                "that it was trained with, or another --save-dir"
            ) from error
        if "parameter group" not in str(error):
            raise
        raise UsageError(
            "the checkpoint's optimizer state has another number of parameters than the model: add --reset-optimizer, "
            "or resume with the checkpoint's --arch"
        ) from error
    if state is not None and trainer.cfg.ema.store_ema:  # fairseq restarts the count at 0
        trainer.ema.update_freq_counter = trainer.get_num_updates() % max(trainer.cfg.ema.ema_update_freq, 1)
    start = getattr(trainer.cfg.model, "stack_restart_updates", None)
    if state is None and start and not trainer.get_num_updates():
        trainer.set_num_updates(start)
        if trainer.get_lr() == 0:
            raise UsageError(f"--stack-restart-updates {start}: the schedule's learning rate is 0 there; lower it")
        logger.info(f"--stack-restart-updates: training starts at update {start}, lr {trainer.get_lr():g}")
    return state


TRAINING_ONLY = {
    "dropout", "attention_dropout", "activation_dropout", "layerdrop", "recompute", "offload", "max_positions", "init",
    "pads_right", "aligns", "alignment_layer", "alignment_heads", "layout",
}  # fmt: skip
"""Attributes of a stack that may change between runs: they do not change its outputs, except "layout", which the
methods determine."""
TRAINING_OPTIONS = ("dropout", "rates", "init", "start", "forget_bias")
"""The same for options of methods."""


def check_settings(cfg: Any, state: dict[str, Any], resumes: bool) -> None:
    """Compare the settings of a run with the settings in the checkpoint that it has loaded.

    Args:
        cfg: the run's model settings
        state: the checkpoint
        resumes: the run also continues with the optimizer's state, so it cannot have another model on purpose

    Raises:
        UsageError: a resumed run computes another function; a fine-tuned model only gets a warning
    """
    found = differences(model_flags(state), model_flags({"cfg": {"model": cfg}}))
    if not found:
        return
    problem = f"{found}: the model computes another function than the checkpoint's"
    if resumes:
        raise UsageError(f"{problem}; resume with the checkpoint's settings, or start a new run in another --save-dir")
    logger.warning(f"{problem}; its weights may not fit")


def differences(old: dict[str, Any], new: dict[str, Any], owner: str = "checkpoint") -> str:
    """Name the flags by which the model of *new* computes another function than the model of *old*, *owner*'s.

    It is empty for equal functions, and for models that have no description.
    """
    if any(isinstance(flags.get("encoder"), dict) for flags in (old, new)):
        return ""  # nested settings of fairseq's own models
    try:
        before, after = _computes(fill(old, "the checkpoint")), _computes(fill(new, "the run"))
    except UsageError:  # a model of fairseq that has no description
        return ""
    found = [(flag, after.get((side, flag)), before.get((side, flag))) for side, flag in {**before, **after}]
    texts = (f"{flag} {_shown(now)} ({owner}: {_shown(then)})" for flag, now, then in found if now != then)
    return ", ".join(dict.fromkeys(texts))


def _shown(value: Any) -> str:
    return "unset" if value in (None, False) else "set" if value is True else str(value)


def _computes(flags: argparse.Namespace) -> dict[tuple[str, str], Any]:
    """Return the attributes and options of both stacks on which the function of a model depends, by side and flag."""
    found: dict[tuple[str, str], Any] = {}
    for side, stack in describe(flags).items():
        for name in (field.name for field in fields(stack) if field.name not in TRAINING_ONLY):
            flag, value = stack.given(name)
            found[side, flag] = value.name if isinstance(value, MethodConfig) else value
            while isinstance(value, MethodConfig):
                for option, argument in inspect.signature(value.method.__init__).parameters.items():
                    if argument.default is not argument.empty and not option.endswith((*TRAINING_OPTIONS, "inner")):
                        found[side, value.flag(option)] = value.options.get(option, argument.default)
                value = value.options.get("inner")
    return found
