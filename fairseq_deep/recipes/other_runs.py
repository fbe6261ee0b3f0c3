"""Options of recipes that name another run.

``--start-from RUN`` fine-tunes the model of another run of the same recipe on the same prepared text. ``--against RUN``
compares the translations with another run's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import text_of

from . import seeds
from .stages import hypotheses_of

if TYPE_CHECKING:
    from .plan import Plan

CLASHES = ("--finetune-from-model", "--init-from", "--restore-file")


def weights_of(run: str) -> str:
    """Return the checkpoint that a run ends with."""
    return os.path.join(run, "checkpoints", "checkpoint_last.pt")


def start_flags(run: str) -> list[str]:
    """Return the flags of fairseq-train that start with the weights of *run*; none without a run."""
    return ["--finetune-from-model", weights_of(run)] if run else []


def _missing(plan: Plan, message: str) -> None:
    """Raise a `UsageError`; a dry run only warns, since it may precede the other run."""
    if not plan.options.dry_run:
        raise UsageError(message)
    plan.notes.append(message)


def check_teacher(plan: Plan) -> None:
    """Reject a teacher that does not exist, or is this run."""
    teacher = plan.options.teacher
    if not os.path.exists(teacher):
        _missing(plan, f"--teacher {teacher}: no such run, checkpoint or package")
    elif os.path.isdir(plan.exp) and os.path.samefile(teacher, plan.exp):
        raise UsageError(f"--teacher {teacher} is this run itself: choose another --exp")


def check_start(plan: Plan) -> None:
    """Reject a run without weights or with another text, other flags that set weights, and RoBT without weights.

    Raises:
        UsageError: one line that names the problem and the fix
    """
    run, flags = plan.options.start_from, [word.partition("=")[0] for word in plan.options.extra]
    others, text = [flag for flag in flags if flag in CLASHES], plan.path("text")
    if os.path.exists(text) and os.path.islink(text) != bool(run):
        whose = "a text of its own: omit" if run else "the text of another run: repeat"
        raise UsageError(f"{plan.exp} has {whose} --start-from, or give another --exp")
    if not run:
        if plan.robt and not others:
            raise UsageError("--robt fine-tunes a trained model: add --start-from RUN, a finished run of this recipe")
        return
    if others:
        raise UsageError(f"--start-from and {others[0]} both set weights: omit one of them")
    if not os.path.isfile(weights_of(run)):
        _missing(plan, f"--start-from {run}: {weights_of(run)} does not exist; give the directory of a trained run")
        return
    if os.path.exists(plan.exp) and os.path.samefile(run, plan.exp):
        raise UsageError(f"--start-from {run} is this run itself: give another --exp")
    if text_of(os.path.join(run, ".done.3")).strip() != plan.keys[3]:
        raise UsageError(f"--start-from {run} has another text or other sub-words: repeat its options of the text")
    if 0 < plan.options.stage < 4:
        raise UsageError(f"--start-from {run}: stages before 4 would change that run's text; use --stage 4 or later")


def check_against(plan: Plan) -> None:
    """Reject ``--against`` without existing translations, before training.

    Raises:
        UsageError: one line that names the problem and the fix
    """
    against, target = plan.options.against, plan.options.target_lang
    if not against:
        return
    if not plan.subsets:
        raise UsageError("--against requires translations, but --subsets none skips them: omit one of them")
    if not os.path.exists(against):
        _missing(plan, f"--against {against}: no such run or file")
        return
    runs = [against]
    if seeds.holds_seeds(against):
        if not plan.seed_list:
            raise UsageError(f"--against {against} has several seeds: give one of them, such as {against}/seed1")
        runs = [f"{against}/seed{seed}" for seed in plan.seed_list]
    for run in runs:
        if plan.options.multilingual and not os.path.isdir(os.path.join(run, "pairs")):
            raise UsageError(f"--against {run} has no directory pairs: give a finished run of this recipe")
        if not os.path.isfile(hypotheses_of(run, target)):
            _missing(plan, f"--against: {hypotheses_of(run, target)} does not exist: finish that run first")
    if os.path.exists(plan.exp) and os.path.samefile(against, plan.exp):
        raise UsageError(f"--against {against} is this run itself: give another one")
