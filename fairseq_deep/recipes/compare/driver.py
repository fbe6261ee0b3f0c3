"""Trains systems under equal conditions and compares them: ``examples/compare/run.sh``."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import cluster
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes.changes import PLANNED, ends_in_warmup
from fairseq_deep.recipes.engine import Engine
from fairseq_deep.recipes.plan import Plan
from fairseq_deep.recipes.record import read_json, write_json
from fairseq_deep.recipes.runner import Runner, StageFailed
from fairseq_deep.recipes.steps import STAGES
from fairseq_deep.recipes.trainings import Run, runs_of
from fairseq_deep.tools.command_lines import flags_of

from . import depth, results, table, tune
from .options import Compare, check_options, conditions, load_size, resolve, resolve_schedule
from .systems import System, check, check_unchanged, read_systems

FAILED = 3  # exit status if some training runs failed; 1 is the status of unexpected errors
TEXT = "the hash of the text"  # a condition


def check_conditions(exp: str, old: dict[str, Any], now: dict[str, Any], flags: list[list[str]]) -> None:
    """Reject conditions that differ from the *old* ones, except more updates if the *flags* of systems allow it."""
    planned = any(flags_of(words).get("--lr-scheduler") in PLANNED for words in flags)
    for name in {**now, **old} if old else ():
        before, after = old.get(name), now.get(name)
        if before == after or name == "--updates" and before < after and not planned:
            continue
        before, after = ("the default" if value in (None, "") else value for value in (before, after))
        raise UsageError(f"{exp} was begun with another value of {name}: {before}, now {after}: use another --exp")


def shared_flags(args: Compare) -> tuple[list[str], int]:
    """Return flags of fairseq-train for all systems, with common width and intervals, and the logging interval."""
    every = max(1, min(100, args.updates // 50))
    flags = ["--max-update", str(args.updates), "--log-interval", str(every)]
    flags += ["--validate-interval", "1000000", "--validate-interval-updates", str(max(1, args.updates // 20))]
    flags += ["--keep-last-epochs", str(args.average)] if args.average > 1 else ["--no-epoch-checkpoints"]
    if args.width:
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-embed-dim", str(args.width), f"--{side}-attention-heads", str(args.heads)]
    if "--disable-validation" in args.extra:
        raise UsageError("--disable-validation is not supported, since validation loss is compared: omit it")
    if "--max-update" in flags_of(args.extra):
        raise UsageError("--max-update is set by this script: see --updates")
    return flags + args.extra + args.schedule, every


def plan_system(args: Compare, system: System, resumes: bool, folder: str = "runs", **settings: Any) -> Plan:
    """Return the plan of a system with all seeds, in the subdirectory *folder* of the experiment.

    Args:
        resumes: whether the plan must agree with existing runs
        settings: other options of the recipe
    """
    flags, every = shared_flags(args)
    if system.ours:
        flags += ["--log-depth-interval", str(every)]
    flags += [*system.sizes, *system.flags]
    options = args.run(system.arch, os.path.join(args.exp, folder, system.label), flags, **settings)
    return Plan(options).resolve(resumes)


def plan_runs(args: Compare, systems: list[System], final: bool = True) -> list[Run]:
    """Return all runs: all systems with the first seed, then all systems with the second, and so on.

    Args:
        final: whether the learning rates are final; existing runs must then agree with the systems
    """
    if final:
        check_unchanged(systems, os.path.join(args.exp, "runs"))
    runs = [run for system in systems for run in runs_of(plan_system(args, system, final), system)]
    return sorted(runs, key=lambda run: args.seed_list.index(run.seed))


def report(args: Compare, systems: list[System], runs: list[Run]) -> None:
    """Write table and picture."""
    parts = results.read_parts(runs, args.data and os.path.join(args.data, "test.domain"), args.halves)
    rows = results.rows(systems, runs, args.exp, parts, float(args.margin))
    if not any(row["done"] or row["failed"] for row in rows):
        raise UsageError(f"{args.exp} has no finished training run: train first, without --table-only")
    folder = args.tables or args.exp
    os.makedirs(folder, exist_ok=True)
    text = table.write(folder, rows, results.facts(rows))
    if not args.tables:
        print(f"\n{text}")
    if args.depth_list:
        depth.report(folder, rows, args.tune_updates if args.tune_updates < args.updates else None)
    drawn = "; no picture, since all runs failed"
    if any(row["done"] for row in rows):
        try:
            from . import picture

            picture.draw(rows, os.path.join(folder, "picture.png"))
            drawn = ", picture.png"
        except ImportError as error:
            drawn = f"; no picture: {error}; pip install matplotlib"
    print(f"-> {folder}: table.md, table.json{drawn}")


def show_plan(args: Compare, systems: list[System], runs: list[Run]) -> None:
    """Print the systems, the number of runs and the warm-up; in a dry run, also the training commands."""
    todo = [run for run in runs if not run.is_done()]
    width = max(len(system.label) for system in systems)
    for system in systems:
        print(f"  {system.label:{width}}  {system.text}")
    seeds = ", ".join(map(str, args.seed_list))
    left = f"{len(todo)} of {len(runs)} runs left"
    print(f"{len(systems)} systems x seeds {seeds}, {args.updates:,} updates each: {left}", flush=True)
    lengths = [flags_of(words).get("--warmup-updates", args.warmup) for words in (args.schedule, args.tune_schedule)]
    if {*lengths} != {args.warmup}:
        searched = f", {lengths[1]} in the search" * (args.tune != "none")
        print(f"warm-up in proportion to the updates: {lengths[0]}{searched}, not {args.warmup}; -- --warmup-updates N "
              "changes it", flush=True)  # fmt: skip
    for note in runs[0].plan.notes:
        print(f"warning: {note}", flush=True)
    for run in runs[: len(systems)]:
        note = ends_in_warmup(run.plan.args)
        if note:
            print(f"warning: {run.system.label}: {note}", flush=True)
    if not args.dry_run:
        return
    if args.tune != "none":
        print(f"first the learning rates: {len(systems)} systems x 3 rates or more, {args.tune_updates:,} updates "
              f"each, seed {args.tune_seed}")  # fmt: skip
    for run in runs[: len(systems)]:
        print(shlex.join(run.plan.train_command))


def work(args: Compare) -> None:
    """Run a comparison.

    Raises:
        StageFailed: some training runs failed
    """
    resolve(args)
    place = os.path.join(args.exp, "conditions.json")
    old = read_json(place)
    resolve_schedule(args, old)
    systems = read_systems(args.arguments, args.systems)
    text = plan_system(args, System("shared", systems[0].arch, []), False, "", stop_stage=3)
    now = {**conditions(args), TEXT: old.get(TEXT) if args.table_only else text.keys[3]}
    check_conditions(args.exp, old, now, [[*args.extra, *system.flags] for system in systems])
    systems = depth.expand(systems, args.depth_list) if args.depth_list else systems
    check(systems, lambda system: plan_system(args, system, resumes=False).args, args.width)
    search = None
    if args.tune != "none":
        search = tune.Tuner(args, plan_runs, tune.rate_of(flags_of(text.train_command), "-- --lr"))
        for system in systems:
            search.first_rates(system)  # rejects systems whose rates cannot be searched
        systems = search.choose(systems) if args.table_only else systems
    runs = plan_runs(args, systems, final=not search or args.table_only)
    if args.launcher == "slurm" and not args.table_only:
        cluster.check(args)
    show_plan(args, systems, runs)
    if args.dry_run:
        return
    if args.table_only:
        report(args, systems, runs)
        return
    with Engine() as engine:
        engine.take_lock(args.exp)
        os.makedirs(text.path("logs"), exist_ok=True)
        asyncio.run(Runner(text, engine).run_stages(STAGES, 0, 3))
        write_json(place, now)

        def train(runs: list[Run]) -> list[Run]:
            for run in runs:
                run.system.record(os.path.dirname(run.folder))
            return cluster.train(engine, runs, args, text.exp)

        if search:
            systems = search.choose(systems, train)
            print("\n".join(map(tune.describe, systems)), flush=True)
            runs = plan_runs(args, systems)
        failed = train(runs)
        report(args, systems, runs)
    if failed:
        names = ", ".join(run.name for run in failed)
        raise StageFailed(f"{len(failed)} of {len(runs)} runs failed: {names}; the same command retries them",
                          FAILED)  # fmt: skip


def main(task: str, script: str, words: list[str]) -> int:
    """Run the command, like a recipe, and return its exit status."""
    options = recipes.read_options(task, words, Compare())
    if options.help:
        load_size(options)
        options.parser(os.path.basename(script)).print_help()
        return 0
    check_options(options)
    work(options)
    return 0
