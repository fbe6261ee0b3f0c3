"""Train systems under equal conditions and put them side by side: ``examples/compare/run.sh``."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sys

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes import lock
from fairseq_deep.recipes.children import call
from fairseq_deep.recipes.plan import Plan, value_of
from fairseq_deep.recipes.process import Stopped
from fairseq_deep.recipes.record import read_json, write_json
from fairseq_deep.tools import write_text

from . import depth, results, table, tune
from .options import Compare, check_options, conditions, resolve
from .systems import check, check_unchanged, read_systems
from .trainings import Run, Trainings, recipe_program

FAILED = 3  # exit status where some trainings failed; 1 is that of whatever nobody has foreseen


class Failed(UsageError):
    """Some trainings failed; the others are in the table."""


def check_conditions(exp, now):
    """Refuse other conditions than those that the folder was begun with; more updates are taken."""
    old = read_json(os.path.join(exp, "conditions.json"))
    for name in [*now, *old] if old else []:
        before, after = old.get(name), now.get(name)
        if before == after or (name == "--updates" and before < after):
            continue
        before, after = ("the default" if value in (None, "") else value for value in (before, after))
        raise UsageError(f"{exp} was begun with another value of {name}: {before}, now {after}: use another --exp")


def shared_flags(args):
    """Flags of fairseq-train for all systems: the width, and what shows a training at equal updates."""
    every = max(1, min(100, args.updates // 50))
    flags = ["--max-update", str(args.updates), "--log-interval", str(every)]
    flags += ["--validate-interval", "1000000", "--validate-interval-updates", str(max(1, args.updates // 20))]
    flags += ["--keep-last-epochs", str(args.average)] if args.average > 1 else ["--no-epoch-checkpoints"]
    if args.width:
        for side in ("encoder", "decoder"):
            flags += [f"--{side}-embed-dim", str(args.width), f"--{side}-attention-heads", str(args.heads)]
    return flags + args.extra, every


def text_of(exp):
    """The recipe's sum over the text that every training in *exp* has had; empty before the first checkpoint."""
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
    """The words for the recipe of one training."""
    own = ["--arch", arch, "--arch-known", "true", "--exp", folder, "--seed", str(seed)]
    return [*args.recipe, "--ngpu", str(args.ngpu), *own, *options, "--", *flags]


def plan(args, systems, flags):
    """All trainings, every system with the first seed, then every system with the second ..."""
    shared, every = flags
    runs = []
    for seed in args.seeds:
        for system in systems:
            folder = os.path.join(args.exp, "runs", system.label, f"seed{seed}")
            depth = ["--log-depth-interval", str(every)] if system.ours else []
            own = [*shared, *depth, *system.sizes, *system.flags]
            runs.append(Run(system, seed, folder, recipe_words(args, system.arch, folder, seed, flags=own)))
    return runs


def train_command(words):
    """fairseq-train of a recipe; what the recipe rejects is rejected here, before anything is written."""
    return Plan(recipes.read_options("compare", words)).resolve().train_command


def without_systems(args, systems, flags):
    """fairseq-train of the first system, without what is its own; other text than that of the trainings is refused."""
    text = "" if args.table_only else text_of(args.exp)
    same = ["--same-text", text] if text else []
    folder = os.path.join(args.exp, "shared")
    return train_command(recipe_words(args, systems[0].arch, folder, args.seeds[0], same, flags[0]))


def prepare_text(args, systems, flags):
    """Set-up and text, once for all; every training finds them in its own folder."""
    folder = os.path.join(args.exp, "shared")
    words = recipe_words(args, systems[0].arch, folder, 1, ["--stop-stage", "3"], flags[0])
    os.environ["RECIPE_OWNER"] = str(os.getpid())
    status, *_ = call(recipe_program(words))
    if status:
        raise SystemExit(status)


class locked:
    """``with locked(folder) as held``: nobody else trains there; what inherits the descriptor ``held`` keeps it."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.held = lock.take(os.path.join(folder, ".lock"), folder)

    def __enter__(self):
        return self.held

    def __exit__(self, *_):
        os.close(self.held)


def report(args, systems, runs):
    """Write table and picture."""
    rows = results.rows(systems, runs, args.bootstrap, args.exp)
    if not any(row["done"] or row["failed"] for row in rows):
        raise UsageError(f"no training in {args.exp} has come to its end: there is nothing to put into a table")
    folder = args.tables or args.exp
    os.makedirs(folder, exist_ok=True)
    text = table.write(folder, rows, results.facts(rows))
    if not args.tables:
        print(f"\n{text}")
    if args.depths:
        report_depth(folder, rows)
    if not any(row["done"] for row in rows):
        print(f"-> {folder}: table.md, table.csv, table.json; no picture, since all have failed")
        return
    try:
        from . import picture

        picture.draw(rows, os.path.join(folder, "picture.png"))
        print(f"-> {folder}: table.md, table.csv, table.json, picture.png")
    except ImportError as error:
        print(f"-> {folder}: table.md, table.csv, table.json; no picture: {error}; pip install matplotlib")


def report_depth(folder, rows):
    """Write ``depth.md``, ``depth.json`` and, with matplotlib, ``depth.png``."""
    lines = {row["line"]: [other for other in rows if other["line"] == row["line"]] for row in rows}
    complete = [row for same in lines.values() if all(row["done"] for row in same) for row in same]
    if not complete:
        return
    found = depth.judge(complete)
    text = depth.page(found)
    write_text(os.path.join(folder, "depth.md"), text)
    write_json(os.path.join(folder, "depth.json"), found)
    print(f"\n{text}")
    with contextlib.suppress(ImportError):
        from . import by_depth

        by_depth.draw([{**row, "label": row["system"]} for row in complete], {}, os.path.join(folder, "depth.png"))


def tuner(args, base, work):
    """What chooses the learning rates; *work* trains runs, or is None."""

    def make(own, systems):
        remember = check_unchanged(systems, os.path.join(own.exp, "runs"), read_json, save_json)
        if work:
            remember()
        return plan(own, systems, shared_flags(own))

    return tune.Tuner(args, make, work, float(value_of(base, "--lr")))


def show_plan(args, systems, runs):
    todo = [run for run in runs if not run.is_done()]
    width = max(len(system.label) for system in systems)
    for system in systems:
        print(f"  {system.label:{width}}  {system.text}")
    seeds = ", ".join(map(str, args.seeds))
    left = f"{len(todo)} of {len(runs)} trainings left"
    print(f"{len(systems)} systems x seeds {seeds}, {args.updates:,} updates each: {left}", flush=True)


def work(args):
    """All of a comparison; returns the exit status."""
    resolve(args)
    now = conditions(args)
    check_conditions(args.exp, now)
    systems, flags = read_systems(args.arguments, args.systems), shared_flags(args)
    systems = depth.expand(systems, args.depths) if args.depths else systems
    base = without_systems(args, systems, flags)
    check(systems, base, args.width)
    tuning = args.tune != "none"
    if tuning and args.table_only:
        systems = tuner(args, base, None).choose(systems)
    if not tuning or args.table_only:
        remember = check_unchanged(systems, os.path.join(args.exp, "runs"), read_json, save_json)
    runs = plan(args, systems, flags)
    show_plan(args, systems, runs)
    if args.dry_run:
        if tuning:
            print(f"first the learning rates: {len(systems)} systems x 3 rates or more, {args.tune_updates:,} updates "
                  f"each, seed {args.tune_seed}")  # fmt: skip
        for run in runs[: len(systems)]:
            print(shlex.join(train_command(run.command)))
        return 0
    if args.table_only:
        report(args, systems, runs)
        return 0
    with locked(args.exp) as held:
        save_json(os.path.join(args.exp, "conditions.json"), now)
        prepare_text(args, systems, flags)

        def work(runs):
            return Trainings(runs, args.jobs, args.ngpu, args.devices, held, os.path.join(args.exp, "shared")).work()

        if tuning:
            systems = tuner(args, base, work).choose(systems)
            print("\n".join(map(tune.describe, systems)), flush=True)
            remember = check_unchanged(systems, os.path.join(args.exp, "runs"), read_json, save_json)
            runs = plan(args, systems, flags)
        remember()
        failed = work(runs)
        report(args, systems, runs)
    if failed:
        raise Failed(
            f"{len(failed)} of {len(runs)} trainings failed: {', '.join(failed)}; the same command tries again"
        )
    return 0


def save_json(path, value):
    """Write an object, and make its folder."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_json(path, value)


def main(script, action, words):
    """The exit status of the command."""
    try:
        options = Compare().parse(words)
        if options.help:
            options.parser(os.path.basename(script)).print_help()
            return recipes.DONE
        check_options(options)
        return 0 if action == "check" else work(options)
    except Stopped as end:
        print(end, file=sys.stderr)
        return 130
    except UsageError as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        return FAILED if isinstance(problem, (Failed, tune.SearchFailed)) else 2
    except SystemExit as end:  # of the recipe
        return end.code
