"""Scripts written by a recipe: its command, a command that resumes it, and a job for SLURM."""

from __future__ import annotations

import os

from .options import flag_of, quote
from .plan import Plan

JOB = """# a signal interrupts this built-in before the child has ended
until wait "$!"; status=$?; ! kill -0 "$!" 2>/dev/null; do :; done

if $over && ((status == 130)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def write_commands(plan: Plan, script: str, words: list[str]) -> None:
    """Write ``cmd.sh`` with the user's command, and ``resume.sh``, which resumes it."""
    kept, others = without_options(words, "stage", "stop_stage", "node_rank")  # markers record the finished stages
    _write(plan.path("cmd.sh"), script, quote(words))
    _write(plan.path("resume.sh"), script, f'{quote(kept)} "$@" {quote(others)}')


def _environment() -> list[str]:
    """Return the lines that change to the current directory and set environment variables of the scripts."""
    chosen = {name: os.environ.get(name) for name in ("FAIRSEQ_DEEP_ENV", "WMT_URL")}
    exports = [quote(["export", f"{name}={value}"]) for name, value in chosen.items() if value]
    return [quote(["cd", os.getcwd()]), *exports]


def _write(path: str, script: str, words: str) -> None:
    # exec forwards signals from this file's shell to the recipe
    lines = ["#!/usr/bin/env bash", *_environment(), f"{quote(['exec', script])} {words}"]
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n")
    os.chmod(f"{path}.new", 0o755)
    os.replace(f"{path}.new", path)


def without_options(words: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Return the words before ``--`` without the options *names* and their values, and the rest."""
    flags, kept, rest = [flag_of(name) for name in names], [], list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in flags:
            kept.append(word)
        elif not equals and rest:
            rest.pop(0)
    return kept, rest


def write_sbatch(plan: Plan, script: str, words: list[str]) -> None:
    """Write a SLURM job that runs this command with one task per machine and resumes after its time limit."""
    options, (kept, others) = plan.options, without_options(words, "sbatch", "nnodes", "node_rank", "master")
    gpus = [f"#SBATCH --gpus-per-node={options.ngpu}"] if options.ngpu else []
    alone = ["--force-batch", "true"] if plan.place.nnodes > 1 and "force_batch" not in options.given else []
    prepare = [script, *without_options(kept, "stage", "stop_stage")[0], *alone, "--stop-stage", "3", *others]
    cores = 4 * options.ngpu or max(options.cpu_processes, options.workers)
    settings = [f"job-name={options.task}", f"nodes={plan.place.nnodes}", "ntasks-per-node=1",
                f"cpus-per-task={cores}"]  # fmt: skip
    limits = ["time=24:00:00", "requeue", "signal=B:USR1@300", "open-mode=append", "output=train-%j.log"]
    folder, *exports = _environment()
    lines = [
        "#!/usr/bin/env bash",
        f"# The recipe on {plan.place.nnodes} machine(s): {quote(['sbatch', options.sbatch])}. Options of sbatch, such "
        "as --time, override these.",
        "# 300 seconds before the time limit (this must be enough for one validation), training saves a checkpoint and",
        "# the job is requeued. At SIGTERM, a pre-empted job saves a checkpoint, and SLURM requeues it.",
        "# Compute nodes without a network: prepare environment and text on the login node first, with",
        f"#   {quote(prepare)}",
        *(f"#SBATCH --{setting}" for setting in settings), *gpus, *(f"#SBATCH --{limit}" for limit in limits),
        "set -uo pipefail", f"{folder} || exit 2", *exports, "over=false", """trap 'over=true; kill -USR1 "$!"' USR1""",
        # srun does not inherit the cores
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {quote([script, *kept, *others])} &', JOB,
    ]  # fmt: skip
    with open(f"{options.sbatch}.new", "w", encoding="utf-8") as stream:
        stream.write("\n".join(lines))
    os.replace(f"{options.sbatch}.new", options.sbatch)
    print(f"wrote {options.sbatch}: {quote(['sbatch', options.sbatch])}")
