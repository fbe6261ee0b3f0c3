"""Comparison of training commands: a run can resume with a different command only if it trains the same model."""

from __future__ import annotations

import argparse
import os
import re
import shlex

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.command_lines import flags_of
from fairseq_deep.tools.input_text import text_of

FREE = """
--user-dir --save-dir --max-epoch --max-update --stop-time-hours --stop-min-lr --num-workers --log-format --log-interval
--log-file --log-depth-interval --no-progress-bar --tensorboard-logdir --wandb-project --azureml-logging --aim-repo
--save-interval --save-interval-updates --keep-interval-updates --keep-interval-updates-pattern --keep-last-epochs
--keep-best-checkpoints --no-epoch-checkpoints --no-last-checkpoints --no-save --validate-interval
--validate-interval-updates --disable-validation --max-tokens-valid --batch-size-valid --patience --empty-cache-freq
--data-buffer-size --ddp-backend --distributed-world-size --distributed-backend --cpu --compile --checkpoint-activations
--write-checkpoints-asynchronously --on-divergence --max-tokens --update-freq
""".split()
"""Flags that do not change the trained model; batch size and devices are compared elsewhere, as a product."""
PLANNED = ("inverse_sqrt_cooldown", "cosine")
"""Learning-rate schedules that depend on ``--max-update``: a longer training has other rates from the start."""

STARTED = ("inverse_sqrt", "inverse_sqrt_cooldown", "cosine", "step", "reduce_lr_on_plateau")
"""Schedules with ``--warmup-init-lr``, the learning rate at the start of the warm-up."""

LENGTHS = ("--warmup-updates", "--cooldown-updates", "--total-num-update")
"""Lengths of a schedule, which a shorter search scales."""


def ends_in_warmup(args: argparse.Namespace) -> str:
    """Return a note if the training command *args* has no more updates than its warm-up; otherwise ""."""
    updates, warmup = args.max_update, getattr(args, "warmup_updates", 0)
    if not 0 < updates <= warmup:
        return ""
    return f"training ends within its warm-up (--max-update {updates}, --warmup-updates {warmup})"


def fit_schedule(words: list[str], more: list[str]) -> list[str]:
    """Return *words* without ``--warmup-init-lr`` if the schedule, which the words in *more* can change, lacks it."""
    if flags_of([*words, *more]).get("--lr-scheduler", "inverse_sqrt") in STARTED or "--warmup-init-lr" not in words:
        return words
    place = words.index("--warmup-init-lr")
    return [*words[:place], *words[place + 2 :]]


def scaled(words: list[str], share: float, names: tuple[str, ...] = LENGTHS) -> list[str]:
    """Return flags that multiply the lengths *names* of the schedule in *words* by *share*."""
    given = flags_of(words) if share != 1 else {}
    lengths = {name: int(given[name]) for name in names if given.get(name, "").isdecimal()}
    return [word for name, value in lengths.items() if value for word in (name, str(max(1, round(value * share))))]


def effective(command: list[str]) -> dict[str, str]:
    """Return the flags of a fairseq-train command that change the trained model."""
    flags = flags_of(command[2:])
    planned = ("--max-update",) if flags.get("--lr-scheduler") in PLANNED else ()
    return {flag: value for flag, value in flags.items() if flag not in FREE or flag in planned}


def difference(before: list[str], now: list[str]) -> str:
    """Describe the difference between two commands; empty if they train the same model."""
    old, new = effective(before), effective(now)
    parts = []
    for flag in sorted(old.keys() | new.keys()):
        if old.get(flag) != new.get(flag):
            parts.append(f"{_words(flag, old)}, now {_words(flag, new)}")
    return "; ".join(parts)


def _words(flag: str, found: dict[str, str]) -> str:
    return f"{flag} {found[flag]}".strip() if flag in found else f"without {flag}"


def read_command(path: str) -> list[str]:
    """Return the words of the command in the file *path*; empty if the file does not exist."""
    return shlex.split(text_of(path))


def can_resume(folder: str) -> bool:
    """Return whether fairseq-train would resume from a checkpoint in *folder*."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return any(re.fullmatch(r"checkpoint(_last|\d+|_\d+_\d+)\.pt", name) for name in names)


def check(path: str, exp: str, command: list[str]) -> None:
    """Reject a *command* that trains another model than the command in the file *path*, which began *exp*."""
    before = read_command(path)
    changed = difference(before, command) if before else ""
    if changed:
        raise UsageError(
            f"{exp} was trained with {changed}: use the same flags, use another --exp, "
            f"or delete {os.path.join(exp, 'checkpoints')} to train from scratch"
        )
