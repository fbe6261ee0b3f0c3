"""The driver of a recipe: reads options, prints the plan, and runs the stages."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import text_of
from fairseq_deep.tools.machine import count_cores

from . import cluster, description, scripts, seeds, summary
from .display import Display
from .engine import Engine
from .options import EXAMPLES
from .plan import Plan
from .recipe import Recipe
from .runner import Runner, StageFailed, report_result
from .stages import Markers
from .steps import STAGES, set_up, start_training
from .trainings import runs_of
from .watch import Watch


def read_options(task: str, words: list[str], options: Any = None) -> Any:
    """Return the options of a recipe: its defaults, overridden by the user's options.

    Args:
        task: a directory under ``examples/`` with a file ``recipe.args``
        options: the object that stores them; None: a new `Recipe`
    """
    path, options = os.path.join(EXAMPLES, task, "recipe.args"), options or Recipe()
    options.parse(shlex.split(text_of(path), comments=True), by_user=False)
    options.task = task
    return options.parse(words)


def main(task: str, script: str, words: list[str]) -> int:
    """Run the recipe *task* with the options *words*, and return the exit status.

    Args:
        script: the script of the recipe, which resumes it
    """
    options = read_options(task, words)
    plan = Plan(options)
    if options.help:
        options.parser(os.path.basename(script)).print_help()
        return 0
    plan.resolve()
    if options.launcher == "slurm":
        cluster.check(options)
    print(*description.describe(plan), sep="\n", flush=True)
    free, needed, begun = description.free_gb(plan.exp), options.disk_gb, os.path.exists(plan.path("cmd.sh"))
    if free < needed and not (begun or options.dry_run or plan.place.rank):
        raise UsageError(
            f"{plan.exp}: {free} GB free, {needed} GB needed: choose a larger disk with --exp, or lower "
            "--disk-gb if less is enough"
        )
    return run(plan, script, words)


def run(plan: Plan, script: str, words: list[str]) -> int:
    """Run the stages of this machine, and return the exit status."""
    options, engine = plan.options, Engine()
    runner = Runner(plan, engine)
    if options.dry_run:
        asyncio.run(run_stages(runner))
        return 0
    if not options.ngpu:
        share_cores(options.jobs)
    with engine:
        if not plan.place.rank:
            prepare(runner)
            scripts.write_commands(plan, script, words)
        asyncio.run(run_stages(runner))
        if plan.seed_list and options.stop_stage >= 4:
            train_seeds(runner)
        elif options.stop_stage == 7 and not plan.place.rank:
            summary.print_table(plan.exp, plan.langs, report_result(runner))
    return 0


async def run_stages(runner: Runner) -> None:
    """Run the stages of this machine; the training runs of several seeds are only shown."""
    plan, options = runner.plan, runner.plan.options
    if plan.place.rank:
        await join_training(runner)
        return
    last = options.stop_stage
    await runner.run_stages(STAGES, options.stage, min(last, 3) if plan.seed_list else last)
    for seed in plan.seed_list if runner.dry and last >= 4 else ():
        runner.say(f"seed {seed}")
        await Runner(plan.of_seed(seed), runner.engine).run_stages(STAGES, max(options.stage, 4), last)


def train_seeds(runner: Runner) -> None:
    """Train all seeds in a queue; a failed seed does not stop the others.

    Raises:
        StageFailed: seeds have failed
    """
    plan, options, runs = runner.plan, runner.plan.options, runs_of(runner.plan)
    for run in runs if options.stage else ():
        Markers(run.plan).forget(max(options.stage, 4))
    failed = cluster.train(runner.engine, runs, options, plan.exp)
    if options.stop_stage == 7:
        parts = [[run.seed for run in runs if (run in failed) == bad] for bad in (False, True)]
        summary.summarise(plan.exp, *parts)
    if failed:
        reasons = [f"{run.name}: {run.reason()}, see {run.folder}/logs" for run in failed]
        raise StageFailed(f"{len(failed)} of {len(runs)} runs failed ({'; '.join(reasons)}); fix the problem, "
                          f"then resume: {plan.again}")  # fmt: skip


def share_cores(processes: int) -> None:
    """Divide the cores among *processes* and limit the spinning of their threads.

    The threads synchronise some thousand times per second. Without spinning, waking them takes up to half of the time;
    with long spinning, training is several times slower next to other work.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // processes)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def prepare(runner: Runner) -> None:
    """Create and lock the directory of a run."""
    plan, options = runner.plan, runner.plan.options
    runner.engine.take_lock(plan.exp)
    os.makedirs(plan.path("logs"), exist_ok=True)
    if options.start_from:
        seeds.link_text(options.start_from, plan.exp)
    if options.stage:
        runner.markers.forget(options.stage)


async def join_training(runner: Runner) -> None:
    """Run the part of any machine except the first: train with it."""
    plan, options = runner.plan, runner.plan.options
    rank, first = plan.place.rank, f"{plan.place.host}:{plan.place.port}"
    if not options.stage <= 4 <= options.stop_stage:
        print("only the first machine runs these stages: nothing to do here")
    elif runner.dry:
        await start_training(runner)
    else:
        runner.engine.take_lock(plan.path("logs"), f"node{rank}.lock")
        if not options.stage:
            print("stage 0 set-up", flush=True)
            await runner.attempt(0, lambda each: set_up(each, f"logs/node{rank}.env.txt"), f"0-set-up.node{rank}.log")
            if runner.markers.is_done(4):
                print("stage 4 train: already done", flush=True)
                return
        print(f"stage 4 train, when machine 0 ({first}) has prepared the data", flush=True)
        watch = Watch(Display(every=600))
        await runner.attempt(4, lambda each: start_training(each, watch), f"4-train.node{rank}.log")
        print("  done; machine 0 runs the remaining stages", flush=True)
