"""Train systems under equal conditions and put them side by side: ``examples/compare/run.sh``."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from dataclasses import dataclass

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes import lock, seeds
from fairseq_deep.recipes.children import call
from fairseq_deep.recipes.options import (
    AUTO,
    AUTO_COUNT,
    COUNT,
    NUMBER,
    ROOT,
    SWITCH,
    TEXT,
    WHOLE,
    Options,
    flag_of,
    one_of,
    option,
)
from fairseq_deep.recipes.plan import Plan, count_gpus
from fairseq_deep.recipes.process import Stopped
from fairseq_deep.recipes.recipe import PRECISIONS
from fairseq_deep.recipes.record import read_json, write_json

from . import results, table
from .systems import check, check_unchanged, read_systems
from .trainings import Run, Trainings, recipe_program

SIZE = "; auto: that of the size"
PASSED = ("max_tokens", "update_freq", "batch_tokens", "force_batch", "precision", "embeddings", "bpe_merges",
          "vocab_threshold", "max_words", "average", "beam", "lenpen", "gen_batch", "disk_gb")  # fmt: skip
"""Options of the recipe that are passed on where they are given; their defaults are the recipe's and the size's."""


@dataclass
class Compare(Options):
    """The options of a comparison."""

    argument_name = "SYSTEM... (each NAME, 'NAME FLAGS' or 'LABEL=NAME FLAGS')"

    help: bool = option(False, SWITCH, "show this text and stop")
    dry_run: bool = option(False, SWITCH, "check everything, print what would be trained and change nothing")
    table_only: bool = option(False, SWITCH, "train nothing: write table and picture of what is there")
    systems: str = option("", TEXT, "file with one system a line, after those of the command line")
    seeds: str = option(
        "1", TEXT, "random seeds, every system with each: 3 (that is 1, 2 and 3), or a list such as 4,7"
    )
    updates: int | str = option("auto", AUTO, f"updates of every training{SIZE}")
    jobs: int = option(1, COUNT, "trainings at the same time")
    exp: str = option("auto", TEXT, "folder of the experiment; auto: exp/compare-CONF in the repository")
    tables: str = option(
        "", TEXT, "folder for table and picture; none: that of the experiment, and the table is printed"
    )
    conf: str = option("mini", one_of("mini", "base"), "size: mini (width 128, a CPU) or base (width 512, a GPU)")
    width: int | str = option("auto", AUTO,
                              f"width of all systems, feed-forward 4 x as wide{SIZE}; 0: their own")  # fmt: skip
    heads: int | str = option("auto", AUTO, f"attention heads{SIZE}, or width / 32 with --width")
    translate: bool = option(True, SWITCH, "translate and score the test set with each; false: compare losses only")
    bootstrap: int = option(1000, WHOLE, "resamples of the paired bootstrap; 0: none")
    data: str = option("", TEXT, "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz")
    data_tar: str = option("", TEXT, "Google's pre-processed wmt16_en_de.tar.gz")
    demo: bool = option(False, SWITCH, "the small built-in corpus")
    source_lang: str = option("en", TEXT, "language of the source")
    target_lang: str = option("de", TEXT, "language of the target")
    ngpu: int | str = option(
        "auto", AUTO, "GPUs of each training; 0: the CPU; auto: the visible ones, divided by --jobs"
    )
    workers: int | str = option("auto", AUTO_COUNT, "processes for text work; auto: the number of cores")
    max_tokens: int | str = option("auto", AUTO, f"tokens per device and step{SIZE}")
    update_freq: int | str = option(
        "auto", AUTO, "steps per update; auto: so that the tokens per update are the size's"
    )
    batch_tokens: int | str = option("auto", AUTO, f"tokens per update{SIZE}")
    force_batch: bool = option(False, SWITCH, "accept other tokens per update than those of the size")
    precision: str = option("fp32", PRECISIONS, "fp32, fp16, bf16 or amp")
    embeddings: str = option("all", one_of("all", "target"),
                             "tables: one for all, or one of the source, one of target and output")  # fmt: skip
    bpe_merges: int | str = option("auto", AUTO, f"merges of the joint BPE{SIZE}")
    vocab_threshold: int = option(0, WHOLE, "sub-words seen fewer times become unknown")
    max_words: int = option(250, COUNT, "longest training sentence in words")
    average: int | str = option("auto", AUTO, f"last epochs to average{SIZE} (1: the last checkpoint alone)")
    beam: int = option(4, COUNT, "beam width")
    lenpen: str = option("0.6", NUMBER, "length penalty")
    gen_batch: int = option(32, COUNT, "sentences per batch when translating")
    disk_gb: int | str = option("auto", AUTO, f"free space asked for before the start, in GB{SIZE}")


# width, heads, updates, epochs to average
SIZES = {"mini": (128, 4, 2000, 1), "base": (512, 8, 15000, 3)}
# what makes no other experiment
FREE = ("--data", "--data-tar", "--workers", "--force-batch", "--disk-gb", "--subsets")


FAILED = 3  # exit status where some trainings failed; 1 is that of whatever nobody has foreseen


class Failed(UsageError):
    """Some trainings failed; the others are in the table."""


def check_options(options: Compare) -> None:
    """Reject what needs no package to be seen."""
    if not (options.data or options.data_tar or options.demo):
        langs = f"{options.source_lang},{options.target_lang}"
        raise UsageError(f"--data is missing: a folder with {{train,valid,test}}.{{{langs}}}, plain or .gz (or --demo)")


def resolve(options: Compare) -> None:
    """Replace "auto" by what it stands for, and collect the words for the recipe."""
    if options.exp == "auto":
        options.exp = os.path.join(ROOT, "exp", f"compare-{options.conf}")
    options.exp = os.path.join(os.getcwd(), options.exp)
    options.recipe = [
        "--conf",
        options.conf,
        "--source-lang",
        options.source_lang,
        "--target-lang",
        options.target_lang,
    ]
    for name in ("data", "data_tar", "workers", *PASSED):
        value = getattr(options, name)
        if name in options.given and value != "auto":
            options.recipe += [flag_of(name), str(value).lower() if isinstance(value, bool) else str(value)]
    options.recipe += ["--demo", "true"] * options.demo + ["--subsets", "none"] * (not options.translate)
    width, heads, updates, average = SIZES[options.conf]
    options.updates = updates if options.updates == "auto" else options.updates
    if options.updates < 1:
        raise UsageError("--updates must be at least 1")
    if options.width != "auto":
        width, heads = options.width, max(1, options.width // 32)
    options.width, options.heads = width, heads if options.heads == "auto" else options.heads
    if width and (options.heads < 1 or width % options.heads):
        raise UsageError(f"--width {width} is not divisible by {options.heads} heads: change --width or --heads")
    if options.average == "auto":
        options.average = average
        options.recipe += ["--average", str(average)]
    options.seeds, options.devices = seeds.parse(options.seeds), count_gpus()
    each = max(1, options.devices // options.jobs) if options.devices else 0
    options.ngpu = each if options.ngpu == "auto" else options.ngpu
    if not options.devices or not options.ngpu:  # the trainings that run at the same time share the cores
        recipes.share_cores(options.jobs)


def conditions(args):
    """What all systems of one folder have in common, as the user says it."""
    pairs = dict(zip(args.recipe[::2], args.recipe[1::2]))
    known = {flag: value for flag, value in pairs.items() if flag not in FREE}
    known.update({"--updates": args.updates, "--width": args.width, "--heads": args.heads})
    return {**known, "the flags after the lone --": shlex.join(args.extra)}


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
        from . import picture

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


def work(args):
    """All of a comparison; returns the exit status."""
    resolve(args)
    now = conditions(args)
    check_conditions(args.exp, now)
    systems, flags = read_systems(args.arguments, args.systems), shared_flags(args)
    base = without_systems(args, systems, flags)
    check(systems, base, args.width)
    remember = check_unchanged(systems, os.path.join(args.exp, "runs"), read_json, save_json)
    runs = plan(args, systems, flags)
    show_plan(args, systems, runs)
    if args.dry_run:
        for run in runs[: len(systems)]:
            print(shlex.join(train_command(run.command)))
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
    """Write an object, and make its folder."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_json(path, value)


def main(script, action, words):
    """The exit status of the command."""
    try:
        options = Compare().parse(words)
        if options.help:
            print(options.usage(os.path.basename(script)))
            return recipes.DONE
        check_options(options)
        return 0 if action == "check" else work(options)
    except Stopped as end:
        print(end, file=sys.stderr)
        return 130
    except UsageError as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        return FAILED if isinstance(problem, Failed) else 2
    except SystemExit as end:  # of the recipe
        return end.code
