"""Train the systems of a claim, judge its statements, write its table and picture. ``run.sh`` calls it."""

import argparse
import contextlib
import itertools
import json
import os
import sys

import fit
import judge
import page
import speed
from children import call
from compare import FAILED, locked
from corpus import BAD_INPUT, find_text, read_lines
from corpus import run as run_helper
from definitions import CLAIMS, PAPERS
from report import read_json
from scales import SCALES, WIDTHS

from fairseq_deep.core.registry import nearest
from fairseq_deep.tools import UsageError, format_table, write_text

HERE = os.path.dirname(os.path.abspath(__file__))
COMPARE = os.path.join(os.path.dirname(HERE), "compare", "run.sh")
LEAST = {"train": 5000, "test": 200}
"""Sentence pairs below which nothing can be seen: no model would translate, or no difference be significant."""


def parse(words):
    """Options before a lone --; after it the number of claims, the claims, and flags for all trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    texts = ("scale", "data", "source-lang", "target-lang", "seeds", "updates", "exp", "ngpu", "precision", "workers")
    for name in texts:
        parser.add_argument(f"--{name}", required=True)
    for name in ("list", "demo", "dry-run", "table-only", "speed"):
        parser.add_argument(f"--{name}", type=lambda text: text == "true", required=True)
    for name in ("jobs", "resamples", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    middle = words.index("--")
    args, rest = parser.parse_args(words[:middle]), words[middle + 1 :]
    args.claims, args.flags = rest[1 : 1 + int(rest[0])], rest[1 + int(rest[0]) :]
    return args


def check(args):
    """Refuse what cannot work before anything is trained."""
    if not args.claims:
        raise UsageError("no claim named: give one or more, as in: run.sh --data DIR depth (--list shows them)")
    for name in args.claims:
        if name not in CLAIMS:
            raise UsageError(f"there is no claim '{name}'{nearest(name, CLAIMS)}: --list shows them")
    if args.data and args.demo:
        raise UsageError("--data and --demo exclude each other: give one")
    if not args.data and not args.demo:
        names = f"{{train,valid,test}}.{{{args.source_lang},{args.target_lang}}}"
        raise UsageError(f"--data is missing: a folder with {names}, plain or .gz (or --demo)")
    if args.resamples < 100:
        raise UsageError(f"--resamples {args.resamples} is too few for a p of 0.05: use 100 or more")
    for split, least in LEAST.items() if args.data else ():
        path = find_text(args.data, f"{split}.{args.target_lang}")
        count = sum(1 for _ in itertools.islice(read_lines(path), least))
        if count < least:
            raise UsageError(
                f"{args.data} has {count:,} sentence pairs of {split}, too few to judge a claim: give {least:,} or more"
            )


def list_claims():
    rows = [("claim", "systems", "source", "")]
    rows += [(name, str(len(claim.systems)), claim.source, claim.title) for name, claim in CLAIMS.items()]
    print(format_table(rows, right=(1,)))
    print("\n" + "\n".join(f"{short}: {paper}" for short, paper in PAPERS.items()))


def compare_command(args, name):
    """compare's run.sh for the systems of the claim *name*."""
    claim = CLAIMS[name]
    options, flags = map(str.split, SCALES[args.scale][claim.group])
    hidden = str(3 * WIDTHS[args.scale])
    words = [COMPARE, *options, "--exp", group_folder(args, claim), "--tables", os.path.join(args.exp, name)]
    words += ["--seeds", args.seeds, "--jobs", str(args.jobs), "--ngpu", args.ngpu, "--precision", args.precision]
    words += ["--source-lang", args.source_lang, "--target-lang", args.target_lang, "--workers", args.workers]
    words += ["--bootstrap", str(args.resamples), *(["--data", args.data] if args.data else ["--demo"])]
    if args.updates != "auto":
        words += ["--updates", args.updates]
    words += [flag for flag in ("--dry-run", "--table-only") if getattr(args, flag[2:].replace("-", "_"))]
    words += [f"{system.label}={system.words.format(hidden=hidden)}" for system in claim.systems]
    return [*words, "--", *flags, *args.flags]


def group_folder(args, claim):
    return os.path.join(args.exp, "trainings", claim.group)


def run_claim(args, name):
    """All of one claim; returns compare's exit status."""
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
    write_text(os.path.join(folder, "claim.json"), json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\n-> {folder}: claim.md, claim.json, {page.pictures(folder, claim, systems, timed)}")
    for problem in problems:
        print(f"error: {name}: not all was measured: {' '.join(problem.split())}", file=sys.stderr)
    return FAILED if problems else status


def measured(claim, systems, folder, args):
    """Times and fit, where the claim is about them, and what went wrong; nobody trains beside that in its group."""
    alone = not args.table_only and {"speed", "fit"} & set(claim.extras)
    with locked(group_folder(args, claim)) if alone else contextlib.nullcontext():
        timed, slow = speed.measure(systems, folder, args) if "speed" in claim.extras else ({}, [])
        fitted, unfit = fit.measure(systems, args) if "fit" in claim.extras else ({}, [])
    return timed, fitted, [*slow, *unfit]


def main():
    args = parse(sys.argv[1:])
    if args.list:
        list_claims()
        return 0
    check(args)
    worst = 0
    for name in args.claims:
        status = run_claim(args, name)
        if status not in (0, FAILED):
            return status
        worst = max(worst, status)
    return worst


def guarded():
    try:
        return main()
    except UsageError as problem:
        print("error: " + " ".join(str(problem).split()), file=sys.stderr)
        return 2
    except SystemExit as end:  # of the recipe's helpers
        return 2 if end.code == BAD_INPUT else end.code


if __name__ == "__main__":
    run_helper(guarded)
