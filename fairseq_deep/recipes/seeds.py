"""Training with several seeds: one common text in the experiment's directory, and one run per seed in seedN."""

from __future__ import annotations

import glob
import os
import re
import shutil
from typing import TYPE_CHECKING

from fairseq_deep.errors import UsageError

from .options import flag_of

if TYPE_CHECKING:
    from .plan import Plan
    from .recipe import Shared


def parse(text: str) -> list[int]:
    """Parse a number of seeds (3: seeds 1, 2 and 3), or a list with at least one comma ("4,7" or "7,").

    Raises:
        UsageError: *text* is neither, or repeats a seed
    """
    if re.fullmatch("[1-9][0-9]{0,2}", text):
        return list(range(1, int(text) + 1))
    if not re.fullmatch("((0|[1-9][0-9]*),)+(0|[1-9][0-9]*)?", text):
        raise UsageError(f"--seeds must be a number, such as 3, or a list such as 4,7 (one seed: 7,), not '{text}'")
    seeds = [int(word) for word in text.removesuffix(",").split(",")]
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise UsageError(f"--seeds {text} has seed {seed} twice: remove one")
    return seeds


def resolve(plan: Plan) -> list[int]:
    """Return the seeds of a plan; empty for a single run."""
    options = plan.options
    if not options.seeds:
        for name in ("jobs", "launcher"):
            if name in options.given and options.task != "compare":
                raise UsageError(f"{flag_of(name)} requires several training runs: add --seeds, or omit it")
        if options.stop_stage >= 4 and holds_seeds(plan.exp):
            raise UsageError(f"{plan.exp} has several seeds: give --seeds, or another --exp")
        return []
    if "seed" in options.given:
        raise UsageError("--seed and --seeds exclude each other: give one")
    check_launcher(options)
    found = parse(options.seeds)
    if os.path.exists(plan.path("checkpoints")):
        raise UsageError(f"{plan.exp} has a run of one seed: use another --exp")
    return found


def check_launcher(options: Shared) -> None:
    """Reject options of the queue of training runs that have no effect or are missing."""
    for name in ("slurm", "slurm_hours"):
        if name in options.given and options.launcher != "slurm":
            flag = flag_of(name)
            raise UsageError(f"{flag} has no effect without --launcher slurm: add that, or omit {flag}")
    if options.launcher == "slurm" and "ngpu" not in options.given:
        raise UsageError("--launcher slurm requires --ngpu, the number of GPUs of each job: give it, or 0 for the CPU")


def holds_seeds(folder: str) -> bool:
    """Return whether *folder* has runs of several seeds."""
    return any(
        glob.glob(os.path.join(glob.escape(folder), "seed[0-9]*", name)) for name in ("checkpoints", "test.hyp.*")
    )


def link_text(shared: str, folder: str) -> None:
    """Link the text of the directory *shared* into the directory of a run, with the markers of its stages."""
    os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
    for part in ("text", "data-bin"):
        path, target = os.path.join(folder, part), os.path.realpath(os.path.join(shared, part))
        if os.path.islink(path):
            os.remove(path)
        os.symlink(os.path.relpath(target, os.path.realpath(folder)), path)
    for name in ("env.txt", *(f".done.{stage}" for stage in range(4))):
        if os.path.isfile(os.path.join(shared, name)):
            shutil.copyfile(os.path.join(shared, name), os.path.join(folder, name))
