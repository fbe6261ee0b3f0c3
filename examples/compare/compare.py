"""Train systems under equal conditions and put them side by side. ``run.sh`` calls it with its options."""

import argparse
import glob
import json
import os
import shlex
import subprocess
import sys

import lock
import results
import table
from corpus import BAD_INPUT
from corpus import run as run_helper
from report import read_json
from systems import check, check_unchanged, read_systems
from trainings import Run, Stopped, Trainings

from fairseq_deep.tools import UsageError, write_text

HERE = os.path.dirname(os.path.abspath(__file__))
# width, heads, updates, epochs to average
SIZES = {"mini": (128, 4, 2000, 1), "base": (512, 8, 15000, 3)}
# what makes no other experiment
FREE = ("--data", "--data-tar", "--workers", "--force-batch", "--disk-gb", "--subsets")


FAILED = 3  # exit status where some trainings failed; 1 is that of whatever nobody has foreseen


class Failed(UsageError):
    """Some trainings failed; the others are in the table."""


def parse(words):
    """Options before a lone --; after it two lists, each after its length, and the systems."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--exp", "--conf", "--seeds", "--updates", "--width", "--heads", "--ngpu", "--dry-run"):
        parser.add_argument(flag, required=True)
    for flag in ("--jobs", "--devices", "--bootstrap"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--table-only")
    parser.add_argument("--tables")
    parser.add_argument("--file")
    middle = words.index("--")
    args, rest = parser.parse_args(words[:middle]), words[middle + 1 :]
    args.recipe, rest = rest[1 : 1 + int(rest[0])], rest[1 + int(rest[0]) :]
    args.flags, args.systems = rest[1 : 1 + int(rest[0])], rest[1 + int(rest[0]) :]
    args.dry_run, args.table_only = args.dry_run == "true", args.table_only == "true"
    return args


def resolve(args):
    """Turn texts into numbers, and ``auto`` into what it stands for."""
    width, heads, updates, average = SIZES[args.conf]
    args.updates = updates if args.updates == "auto" else int(args.updates)
    if args.updates < 1:
        raise UsageError("--updates must be at least 1")
    if args.width != "auto":
        width, heads = int(args.width), max(1, int(args.width) // 32)
    args.width, args.heads = width, heads if args.heads == "auto" else int(args.heads)
    if args.width and (args.heads < 1 or args.width % args.heads):
        raise UsageError(f"--width {args.width} is not divisible by {args.heads} heads: change --width or --heads")
    if "--average" not in args.recipe:
        args.recipe += ["--average", str(average)]
    args.average = int(args.recipe[args.recipe.index("--average") + 1])
    args.seeds = which_seeds(args.seeds)
    each = max(1, args.devices // args.jobs) if args.devices else 0
    args.ngpu = each if args.ngpu == "auto" else int(args.ngpu)


def which_seeds(text):
    """The seeds that *text* names as in the recipes: 3 are 1, 2 and 3; with a comma it is a list."""
    words = text.split(",")
    seeds = [int(word) for word in words if word.isascii() and word.isdigit()]
    if len(set(seeds)) < len(words) or seeds == [0]:
        raise UsageError(f"--seeds takes how many, such as 3, or different ones, such as 4,7, not '{text}'")
    return list(range(1, seeds[0] + 1)) if len(seeds) == 1 else seeds


def conditions(args):
    """What all systems of one folder have in common, as the user says it."""
    pairs = dict(zip(args.recipe[::2], args.recipe[1::2]))
    known = {flag: value for flag, value in pairs.items() if flag not in FREE}
    known.update({"--updates": args.updates, "--width": args.width, "--heads": args.heads})
    return {**known, "the flags after the lone --": shlex.join(args.flags)}


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
    return flags + args.flags, every


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


def recipe_command(args, arch, folder, seed, options=(), flags=()):
    words = [os.path.join(HERE, "one.sh"), *args.recipe, "--ngpu", str(args.ngpu)]
    return [
        *words,
        "--arch",
        arch,
        "--arch-known",
        "true",
        "--exp",
        folder,
        "--seed",
        str(seed),
        *options,
        "--",
        *flags,
    ]


def plan(args, systems, flags):
    """All trainings, every system with the first seed, then every system with the second ..."""
    shared, every = flags
    runs = []
    for seed in args.seeds:
        for system in systems:
            folder = os.path.join(args.exp, "runs", system.label, f"seed{seed}")
            depth = ["--log-depth-interval", str(every)] if system.ours else []
            own = [*shared, *depth, *system.sizes, *system.flags]
            runs.append(Run(system, seed, folder, recipe_command(args, system.arch, folder, seed, flags=own)))
    return runs


def dry_run(run):
    """The commands of *run*; what the recipe refuses is refused here, before anything is written."""
    at = run.command.index("--")
    done = subprocess.run([*run.command[:at], "--dry-run", *run.command[at:]], capture_output=True, text=True)
    if done.returncode:
        raise UsageError((done.stderr.strip().splitlines() or ["the recipe failed"])[-1].removeprefix("error: "))
    return done.stdout


def train_command(text):
    return shlex.split(next(line for line in text.splitlines() if line.startswith("fairseq-train ")))


def without_systems(args, systems, flags):
    """fairseq-train of the first system, without what is its own; other text than that of the trainings is refused."""
    bare = Run(systems[0], args.seeds[0], os.path.join(args.exp, "shared"), [])
    text = "" if args.table_only else text_of(args.exp)
    same = ["--same-text", text] if text else []
    bare.command = recipe_command(args, systems[0].arch, bare.folder, bare.seed, same, flags[0])
    return train_command(dry_run(bare))


def prepare_text(args, systems, flags):
    """Set-up and text, once for all; every training finds them in its own folder."""
    words = recipe_command(args, systems[0].arch, os.path.join(args.exp, "shared"), 1, ["--stop-stage", "3"], flags[0])
    done = subprocess.run(words)
    if done.returncode:
        raise SystemExit(done.returncode)


class locked:
    """``with locked(folder) as held``: nobody else trains there; what inherits the descriptor ``held`` keeps it."""

    def __init__(self, folder, patience=lock.PATIENCE):
        os.makedirs(folder, exist_ok=True)
        self.stream = open(lock.name(folder), "a")
        problem = lock.take(self.stream.fileno(), folder, os.getpid(), patience)
        if problem:
            raise UsageError(problem)

    def __enter__(self):
        return self.stream.fileno()

    def __exit__(self, *_):
        self.stream.close()


def report(args, systems, runs):
    """Write table and picture."""
    rows = results.rows(systems, runs, args.bootstrap)
    if not any(row["done"] or row["failed"] for row in rows):
        raise UsageError(f"no training in {args.exp} has come to its end: there is nothing to put into a table")
    folder = args.tables or args.exp
    os.makedirs(folder, exist_ok=True)
    text = table.write(folder, rows, results.facts(rows))
    if not args.tables:
        print(f"\n{text}")
    if not any(row["done"] for row in rows):
        print(f"-> {folder}: table.md, table.csv, table.json; no picture, since all have failed")
        return
    try:
        import picture

        picture.draw(rows, os.path.join(folder, "picture.png"))
        print(f"-> {folder}: table.md, table.csv, table.json, picture.png")
    except ImportError as error:
        print(f"-> {folder}: table.md, table.csv, table.json; no picture: {error}; pip install matplotlib")


def show_plan(args, systems, runs):
    todo = [run for run in runs if not run.is_done()]
    width = max(len(system.label) for system in systems)
    for system in systems:
        print(f"  {system.label:{width}}  {system.text}")
    seeds = ", ".join(map(str, args.seeds))
    left = f"{len(todo)} of {len(runs)} trainings left"
    print(f"{len(systems)} systems x seeds {seeds}, {args.updates:,} updates each: {left}", flush=True)


def main():
    args = parse(sys.argv[1:])
    resolve(args)
    now = conditions(args)
    check_conditions(args.exp, now)
    systems, flags = read_systems(args.systems, args.file), shared_flags(args)
    base = without_systems(args, systems, flags)
    check(systems, base, args.width)
    remember = check_unchanged(systems, os.path.join(args.exp, "runs"), read_json, save_json)
    runs = plan(args, systems, flags)
    show_plan(args, systems, runs)
    if args.dry_run:
        for run in runs[: len(systems)]:
            print(shlex.join(train_command(dry_run(run))))
        return 0
    if args.table_only:
        report(args, systems, runs)
        return 0
    with locked(args.exp) as held:
        save_json(os.path.join(args.exp, "conditions.json"), now)
        prepare_text(args, systems, flags)
        remember()
        failed = Trainings(runs, args.jobs, args.ngpu, args.devices, held, os.path.join(args.exp, "shared")).work()
        report(args, systems, runs)
    if failed:
        raise Failed(
            f"{len(failed)} of {len(runs)} trainings failed: {', '.join(failed)}; the same command tries again"
        )
    return 0


def save_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def guarded():
    try:
        return main()
    except Stopped as end:
        print(end, file=sys.stderr)
        return 130
    except UsageError as problem:
        print("error: " + " ".join(str(problem).split()), file=sys.stderr)
        return FAILED if isinstance(problem, Failed) else 2
    except SystemExit as end:  # of the recipe's helpers
        return 2 if end.code == BAD_INPUT else end.code


if __name__ == "__main__":
    run_helper(guarded)
