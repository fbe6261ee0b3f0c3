"""Trains systems under equal conditions and compares them: ``examples/compare/run.sh``."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shlex
import sys

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes.changes import PLANNED
from fairseq_deep.recipes.engine import Engine, Stopped
from fairseq_deep.recipes.plan import Plan
from fairseq_deep.recipes.record import read_json, write_json
from fairseq_deep.recipes.runner import Runner, StageFailed
from fairseq_deep.recipes.steps import STAGES
from fairseq_deep.tools import flags_of, write_text

from . import cluster, depth, results, table, tune
from .options import Compare, check_options, conditions, resolve, resolve_schedule
from .systems import check, check_unchanged, read_systems
from .trainings import Run, Trainings

FAILED = 3  # exit status if some training runs failed; 1 is the status of unexpected errors
SEARCH_FAILED = 4  # exit status if runs of the search for learning rates failed, so that there is no table


class Failed(UsageError):
    """Some training runs failed; the others are in the table."""


def check_conditions(exp, old, now, flags):
    """Reject conditions that differ from the *old* ones, except more updates if the *flags* of systems allow it."""
    planned = any(flags_of(words).get("--lr-scheduler") in PLANNED for words in flags)
    for name in [*now, *old] if old else []:
        before, after = old.get(name), now.get(name)
        if before == after or (name == "--updates" and before < after and not planned):
            continue
        before, after = ("the default" if value in (None, "") else value for value in (before, after))
        raise UsageError(f"{exp} was begun with another value of {name}: {before}, now {after}: use another --exp")


def shared_flags(args):
    """Return flags of fairseq-train for all systems, with common width, logging and validation intervals."""
    every = max(1, min(100, args.updates // 50))
    flags = ["--max-update", str(args.updates), "--log-interval", str(every)]
    flags += ["--validate-interval", "1000000", "--validate-interval-updates", str(max(1, args.updates // 20))]
    flags += ["--keep-last-epochs", str(args.average)] if args.average > 1 else ["--no-epoch-checkpoints"]
    if args.width:
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-embed-dim", str(args.width), f"--{side}-attention-heads", str(args.heads)]
    if "--disable-validation" in args.extra:
        raise UsageError("--disable-validation is not supported, since validation loss is compared: omit it")
    return flags + args.extra + args.schedule, every


def text_of(exp):
    """Return the recipe's hash of the text of all runs in *exp*; empty before the first checkpoint."""
    found = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(exp), "runs", "*", "seed*", "trained-with.txt"))):
        folder = os.path.dirname(path)
        ends = (os.path.join("checkpoints", "checkpoint_last.pt"), "finished.json")
        if any(os.path.exists(os.path.join(folder, name)) for name in ends):
            with open(path, encoding="utf-8") as stream:
                found.setdefault("".join(stream.read().splitlines()[2:3]), folder)
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise UsageError(f"{one} and {other} were trained on different text: delete one, or use another --exp")
    return next(iter(found), "")


def recipe_words(args, arch, folder, seed, options=(), flags=()):
    """Return the words for the recipe of one training run."""
    own = ["--arch", arch, "--arch-known", "true", "--exp", folder, "--seed", str(seed)]
    return [*args.recipe, "--ngpu", str(args.ngpu), *own, *options, "--", *flags]


def plan(args, systems, flags):
    """Return all runs: all systems with the first seed, then all systems with the second, and so on."""
    shared, every = flags
    runs = []
    for seed in args.seeds:
        for system in systems:
            folder = os.path.join(args.exp, "runs", system.label, f"seed{seed}")
            depth = ["--log-depth-interval", str(every)] if system.ours else []
            own = [*shared, *depth, *system.sizes, *system.flags]
            runs.append(Run(system, seed, folder, recipe_words(args, system.arch, folder, seed, flags=own)))
    return runs


def plan_of(words):
    """Return the plan of a recipe; invalid options are rejected before files are written."""
    return Plan(recipes.read_options("compare", words)).resolve()


def without_systems(args, systems, flags):
    """Return the fairseq-train command without flags of a system, and reject another text than the runs'."""
    text = "" if args.table_only else text_of(args.exp)
    same = ["--same-text", text] if text else []
    folder = os.path.join(args.exp, "shared")
    return plan_of(recipe_words(args, systems[0].arch, folder, args.seeds[0], same, flags[0])).train_command


def prepare_text(engine, args, systems, flags):
    """Run set-up and text preparation once for all runs; each run links the result into its directory."""
    shared = plan_of(recipe_words(args, systems[0].arch, os.path.join(args.exp, "shared"), 1, (), flags[0]))
    os.makedirs(shared.path("logs"), exist_ok=True)
    try:
        asyncio.run(Runner(shared, engine).run_stages(STAGES, 0, 3))
    except StageFailed as end:
        raise Stopped if end.status == 130 else UsageError(f"{end.reason}; then run the same command again") from None


def report(args, systems, runs):
    """Write table and picture."""
    rows = results.rows(systems, runs, args.bootstrap, args.exp)
    if not any(row["done"] or row["failed"] for row in rows):
        raise UsageError(f"{args.exp} has no finished training run: train first, without --table-only")
    folder = args.tables or args.exp
    os.makedirs(folder, exist_ok=True)
    text = table.write(folder, rows, results.facts(rows))
    if not args.tables:
        print(f"\n{text}")
    if args.depths:
        report_depth(folder, rows, args.tune_updates if args.tune_updates < args.updates else None)
    if not any(row["done"] for row in rows):
        print(f"-> {folder}: table.md, table.csv, table.json; no picture, since all runs failed")
        return
    try:
        from . import picture

        picture.draw(rows, os.path.join(folder, "picture.png"))
        print(f"-> {folder}: table.md, table.csv, table.json, picture.png")
    except ImportError as error:
        print(f"-> {folder}: table.md, table.csv, table.json; no picture: {error}; pip install matplotlib")


def report_depth(folder, rows, searched):
    """Write ``depth.md``, ``depth.json`` and, with matplotlib, ``depth.png``; for *searched* see `depth.page`."""
    lines = {row["line"]: [other for other in rows if other["line"] == row["line"]] for row in rows}
    complete = [row for same in lines.values() if all(row["done"] for row in same) for row in same]
    if not complete:
        return
    found = depth.judge(complete, len(lines))
    text = depth.page(found, [line for line, same in lines.items() if not all(row["done"] for row in same)], searched)
    write_text(os.path.join(folder, "depth.md"), text)
    write_json(os.path.join(folder, "depth.json"), found)
    print(f"\n{text}")
    with contextlib.suppress(ImportError):
        from . import by_depth

        by_depth.draw(complete, os.path.join(folder, "depth.png"))


def tuner(args, base, work):
    """Return the search for learning rates; *work* trains runs, or is None."""

    def make(own, systems):
        remember = check_unchanged(systems, os.path.join(own.exp, "runs"))
        if work:
            remember()
        return plan(own, systems, shared_flags(own))

    return tune.Tuner(args, make, work, tune.rate_of(flags_of(base), "-- --lr"))


def show_plan(args, systems, runs):
    todo = [run for run in runs if not run.is_done()]
    width = max(len(system.label) for system in systems)
    for system in systems:
        print(f"  {system.label:{width}}  {system.text}")
    seeds = ", ".join(map(str, args.seeds))
    left = f"{len(todo)} of {len(runs)} runs left"
    print(f"{len(systems)} systems x seeds {seeds}, {args.updates:,} updates each: {left}", flush=True)
    lengths = [flags_of(words).get("--warmup-updates", args.warmup) for words in (args.schedule, args.tune_schedule)]
    if {*lengths} != {args.warmup}:
        searched = f", {lengths[1]} in the search" * (args.tune != "none")
        print(f"warm-up in proportion to the updates: {lengths[0]}{searched}, not {args.warmup}; -- --warmup-updates N "
              "changes it", flush=True)  # fmt: skip


def work(args):
    """Run a comparison, and return the exit status."""
    resolve(args)
    old = read_json(os.path.join(args.exp, "conditions.json"))
    resolve_schedule(args, old)
    now = conditions(args)
    systems, flags = read_systems(args.arguments, args.systems), shared_flags(args)
    check_conditions(args.exp, old, now, [[*args.extra, *system.flags] for system in systems])
    systems = depth.expand(systems, args.depths) if args.depths else systems
    base = without_systems(args, systems, flags)
    check(systems, base, args.width)
    tuning = args.tune != "none"
    if tuning:
        tuner(args, base, None).check(systems)
    if tuning and args.table_only:
        systems = tuner(args, base, None).choose(systems)
    if not tuning or args.table_only:
        remember = check_unchanged(systems, os.path.join(args.exp, "runs"))
    runs = plan(args, systems, flags)
    show_plan(args, systems, runs)
    if args.launcher == "slurm" and not args.table_only:
        cluster.check(args)
    if args.dry_run:
        if tuning:
            print(f"first the learning rates: {len(systems)} systems x 3 rates or more, {args.tune_updates:,} updates "
                  f"each, seed {args.tune_seed}")  # fmt: skip
        for run in runs[: len(systems)]:
            print(shlex.join(plan_of(run.command).train_command))
        return 0
    if args.table_only:
        report(args, systems, runs)
        return 0
    with Engine() as engine:
        engine.take_lock(args.exp)
        write_json(os.path.join(args.exp, "conditions.json"), now)
        prepare_text(engine, args, systems, flags)

        def train(runs):
            if args.launcher == "slurm":
                return cluster.Cluster(runs, args, plan_of).work()
            return asyncio.run(Trainings(engine, runs, args, plan_of).work())

        if tuning:
            systems = tuner(args, base, train).choose(systems)
            print("\n".join(map(tune.describe, systems)), flush=True)
            remember = check_unchanged(systems, os.path.join(args.exp, "runs"))
            runs = plan(args, systems, flags)
        remember()
        failed = train(runs)
        report(args, systems, runs)
    if failed:
        raise Failed(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; the same command retries them"
        )
    return 0


def main(script, words):
    """Run the command and return its exit status."""
    options = Compare().parse(words)
    if options.help:
        options.parser(os.path.basename(script)).print_help()
        return 0
    check_options(options)
    try:
        return work(options)
    except Stopped:
        jobs = "; the jobs continue (scancel ends them)" if options.launcher == "slurm" else ""
        print(f"stopped{jobs}; to resume, run the same command again", file=sys.stderr)
        return 130
    except (Failed, tune.SearchFailed) as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        return FAILED if isinstance(problem, Failed) else SEARCH_FAILED
