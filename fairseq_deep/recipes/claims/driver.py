"""Trains the systems of a claim, judges its statements, and writes table and picture: ``examples/claims/run.sh``."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from dataclasses import dataclass

from fairseq_deep.core.registry import nearest
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.children import call
from fairseq_deep.recipes.compare.driver import FAILED, locked
from fairseq_deep.recipes.compare.trainings import MAIN
from fairseq_deep.recipes.driver import DONE
from fairseq_deep.recipes.options import (
    AUTO,
    AUTO_COUNT,
    COUNT,
    EXAMPLES,
    FOLDER,
    ROOT,
    SWITCH,
    TEXT,
    WHOLE,
    Options,
    one_of,
    option,
)
from fairseq_deep.recipes.recipe import PRECISIONS
from fairseq_deep.recipes.record import read_json, write_json
from fairseq_deep.recipes.scripts import without_options
from fairseq_deep.recipes.text.corpus import find_text, read_lines
from fairseq_deep.tools import flags_of, format_table

from . import fit, judge, page, speed
from .definitions import CLAIMS, PAPERS
from .scales import SCALES, WIDTHS

COMPARE = os.path.join(EXAMPLES, "compare", "run.sh")
LEAST = {"train": 5000, "test": 200}
"""Minimum numbers of sentence pairs; with fewer, models do not translate, or no difference is significant."""


@dataclass
class Claims(Options):
    """The options of claims."""

    argument_name, argument_help = "CLAIM", "name of a claim; --list shows them"

    list: bool = option(False, SWITCH, "list the claims and exit")
    scale: str = option("mini", one_of("mini", "base"), "mini: width 128, for a CPU; base: width 512, for a GPU")
    data: str = option("", FOLDER, "directory with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz")
    demo: bool = option(False, SWITCH, "use the small built-in corpus, to try the command")
    source_lang: str = option("en", TEXT, "source language")
    target_lang: str = option("de", TEXT, "target language")
    seeds: str = option("1", TEXT, "random seeds: a number such as 3 (seeds 1, 2 and 3), or a list such as 4,7")
    updates: int | str = option("auto", AUTO, "updates of all training runs; auto: as in the scale")
    jobs: int = option(1, COUNT, "number of simultaneous training runs")
    exp: str = option("auto", FOLDER, "directory of the claims; auto: exp/claims-SCALE(-demo) in the repository")
    ngpu: int | str = option(
        "auto", AUTO, "GPUs per training run; 0: the CPU; auto: all visible GPUs, divided by --jobs"
    )
    precision: str = option("fp32", PRECISIONS, "fp32, fp16, bf16 or amp")
    workers: int | str = option("auto", AUTO_COUNT, "processes for text preparation; auto: the number of cores")
    resamples: int = option(1000, WHOLE, "resamples of the paired bootstrap")
    speed: bool = option(True, SWITCH, "measure speed if the claim is about speed; false: skip the measurement")
    rounds: int = option(3, COUNT, "rounds of timing; each round times all systems")
    dry_run: bool = option(False, SWITCH, "check all options, print the plan and change nothing")
    table_only: bool = option(False, SWITCH, "judge existing results without training")


def check(args):
    """Reject invalid options before training."""
    if not args.arguments:
        raise UsageError("no claim given: give one or more, as in: run.sh --data DIR depth (see --list)")
    for name in args.arguments:
        if name not in CLAIMS:
            raise UsageError(f"unknown claim '{name}'{nearest(name, CLAIMS)}: see --list")
    if args.data and args.demo:
        raise UsageError("--data and --demo exclude each other: give one")
    if not args.data and not args.demo:
        names = f"{{train,valid,test}}.{{{args.source_lang},{args.target_lang}}}"
        raise UsageError(f"--data is missing: give a directory with {names}, plain or .gz (or --demo)")
    if args.resamples < 100:
        raise UsageError(f"--resamples {args.resamples} is too few for a p of 0.05: use 100 or more")
    for split, least in LEAST.items() if args.data else ():
        path = find_text(args.data, f"{split}.{args.target_lang}")
        count = sum(1 for _ in itertools.islice(read_lines(path), least))
        if count < least:
            raise UsageError(
                f"{args.data}: the {split} set of {count:,} pairs is too small for a verdict: give {least:,} or more"
            )


def list_claims():
    rows = [("claim", "systems", "source", "")]
    rows += [(name, str(len(claim.systems)), claim.source, claim.title) for name, claim in CLAIMS.items()]
    print(format_table(rows, right=(1,)))
    print("\n" + "\n".join(f"{short}: {paper}" for short, paper in PAPERS.items()))


def compare_command(args, name):
    """Return the command ``compare`` for the systems of the claim *name*."""
    claim = CLAIMS[name]
    options, flags = map(str.split, SCALES[args.scale][claim.group])
    own_warmup = "--warmup-updates" in flags and "--warmup-updates" not in flags_of(args.extra)
    whole = ["--full-updates", flags_of(options)["--updates"]] if own_warmup else []
    if args.updates != "auto":
        options, _ = without_options(options, "updates")
    hidden = str(3 * WIDTHS[args.scale])
    words = [
        sys.executable,
        MAIN,
        "compare",
        COMPARE,
        "run",
        *options,
        *whole,
        "--exp",
        group_folder(args, claim),
        "--tables",
        os.path.join(args.exp, name),
    ]
    words += ["--seeds", args.seeds, "--jobs", str(args.jobs), "--ngpu", str(args.ngpu), "--precision", args.precision]
    words += ["--source-lang", args.source_lang, "--target-lang", args.target_lang, "--workers", str(args.workers)]
    words += ["--bootstrap", str(args.resamples), *(["--data", args.data] if args.data else ["--demo"])]
    if args.updates != "auto":
        words += ["--updates", str(args.updates)]
    words += [flag for flag in ("--dry-run", "--table-only") if getattr(args, flag[2:].replace("-", "_"))]
    words += [f"{system.label}={system.words.format(hidden=hidden)}" for system in claim.systems]
    return [*words, "--", *flags, *args.extra]


def group_folder(args, claim):
    return os.path.join(args.exp, "trainings", claim.group)


def run_claim(args, name):
    """Run one claim, and return compare's exit status."""
    claim, folder = CLAIMS[name], os.path.join(args.exp, name)
    print(f"{name}: {claim.title} ({claim.source})", flush=True)
    status = call(compare_command(args, name))[0]
    if args.dry_run or status not in (0, FAILED):
        return status
    found = read_json(os.path.join(folder, "table.json"))
    systems = judge.systems(claim, found, group_folder(args, claim))
    timed, fitted, problems = measured(claim, systems, folder, args)
    verdicts = [judge.judge(statement, systems, timed, fitted, args.resamples) for statement in claim.statements]
    text = page.write(folder, claim, systems, verdicts, found, timed, fitted)
    record = {"claim": name, "systems": systems, "statements": verdicts, "speed": timed, "fit": fitted}
    write_json(os.path.join(folder, "claim.json"), record)
    print(f"\n{text}\n-> {folder}: claim.md, claim.json, {page.pictures(folder, claim, systems, timed)}")
    for problem in problems:
        print(f"error: {name}: a measurement failed: {' '.join(problem.split())}", file=sys.stderr)
    return FAILED if problems else status


def measured(claim, systems, folder, args):
    """Return times and fit, if the claim requires them, and the failures.

    The lock of the group prevents its training runs during a measurement.
    """
    alone = not args.table_only and {"speed", "fit"} & set(claim.extras)
    with locked(group_folder(args, claim)) if alone else contextlib.nullcontext():
        timed, slow = speed.measure(systems, folder, args) if "speed" in claim.extras else ({}, [])
        fitted, unfit = fit.measure(systems, args) if "fit" in claim.extras else ({}, [])
    return timed, fitted, [*slow, *unfit]


def work(args):
    """Run all claims, and return the exit status."""
    if args.exp == "auto":
        args.exp = os.path.join(ROOT, "exp", f"claims-{args.scale}" + "-demo" * args.demo)
    args.exp, worst = os.path.abspath(args.exp), 0
    for name in args.arguments:
        status = run_claim(args, name)
        if status not in (0, FAILED):
            return status
        worst = max(worst, status)
    return worst


def main(script, action, words):
    """Run the command and return its exit status."""
    try:
        options = Claims().parse(words)
        if options.help or options.list:
            options.parser(os.path.basename(script)).print_help() if options.help else list_claims()
            return DONE
        check(options)
        return 0 if action == "check" else work(options)
    except UsageError as problem:
        print(f"error: {problem.message}", file=sys.stderr)
        return 2
    except SystemExit as end:  # raised for a signal
        return end.code
