"""Decoding and training speed of a claim's systems, measured in separate processes, in turns.

A speed is the median of several rounds. Measurements are stored in ``speed.json`` in the claim's directory. If one of
the systems has been trained since, all are timed again, since only measurements taken in turns are comparable.
"""

import json
import os
import re
import shlex
import shutil
import statistics

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.changes import shorten
from fairseq_deep.recipes.children import call
from fairseq_deep.recipes.record import SPEED, read_json
from fairseq_deep.recipes.scripts import without_options
from fairseq_deep.recipes.stages import crc
from fairseq_deep.tools import write_text

STEP = re.compile(r'"wps": "([\d.]+)", .*"wpb": "([\d.]+)"')
UPDATES = 40
SUBSET = "valid"


def measure(records, folder, args):
    """Return {label: {"tokens_per_second", "rounds", "step_seconds"}} of the trained systems, and a list of problems.

    With ``--table-only`` or ``--speed false``, only valid earlier measurements are used.
    """
    trained = {record["label"]: record["folders"][record["done"][0]] for record in records if record["done"]}
    path = os.path.join(folder, "speed.json")
    key = {label: model_sum(run) for label, run in trained.items()}
    kept = read_json(path)
    look = args.table_only or not args.speed
    if kept.get("key") == key and (look or kept["rounds"] >= args.rounds):
        return kept["systems"], []
    if look:
        return {}, []
    decoded, steps = {label: [] for label in trained}, {label: [] for label in trained}
    problems = {}
    for turn in range(args.rounds):
        for label, training in trained.items():
            if label in problems:
                continue
            print(f"timing {label}, round {turn + 1} of {args.rounds}", flush=True)
            try:
                decoded[label].append(_decode(training))
                steps[label].append(_train(training))
            except UsageError as problem:
                problems[label] = str(problem)
    found = {
        label: {
            "tokens_per_second": statistics.median(decoded[label]),
            "rounds": decoded[label],
            "step_seconds": statistics.median(steps[label]),
        }
        for label in trained
        if label not in problems
    }
    if not problems:
        write_text(path, json.dumps({"key": key, "rounds": args.rounds, "systems": found}, indent=1) + "\n")
    return found, list(problems.values())


def model_sum(folder):
    """Return the checksum of the model of the run in *folder*.

    Raises:
        UsageError: the model is missing
    """
    path = os.path.join(folder, "averaged.pt")
    if not os.path.isfile(path):
        raise UsageError(f"{path} is missing: delete {folder} and run the same command again")
    return crc([path])[0][1]


def run(words, folder, what, cwd=None):
    """Run a command and return its output.

    Raises:
        UsageError: the command failed
    """
    status, output, errors = call(words, cwd=cwd, capture=True)
    if status:
        reason = (errors.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"{folder}: {what} failed: {reason}")
    return output + errors


def find(pattern, text, folder, what):
    """Return the group captured by the last match of *pattern* in *text*.

    Raises:
        UsageError: there is no match
    """
    found = re.findall(pattern, text, re.MULTILINE)
    if not found:
        raise UsageError(f"{folder}: {what} is missing in the command's output; see its logs")
    return found[-1]


def generate_command(folder, subset):
    """Return the recipe's ``fairseq-generate`` command for *subset* of the text of the run in *folder*."""
    with open(os.path.join(folder, "cmd.sh"), encoding="utf-8") as stream:
        lines = stream.read().splitlines()
    words = shlex.split(lines[-1].removeprefix("exec "))
    home = shlex.split(find(r"^cd .*", "\n".join(lines), folder, "the recipe's directory"))[1]
    kept, others = without_options(words, "subsets", "stage", "stop_stage")
    dry = [*kept, "--subsets", "test", "--stage", "6", "--stop-stage", "6", "--dry-run", *others]
    plan = run(dry, folder, "the plan of its translation", cwd=home)
    command = shlex.split(find(r"^fairseq-generate .*", plan, folder, "fairseq-generate"))
    command[command.index("--gen-subset") + 1] = subset
    return command


def _decode(folder):
    """Return the tokens per second of ``fairseq-generate`` on the validation set, with the recipe's settings."""
    text = run(generate_command(folder, SUBSET), folder, "decoding")
    found = SPEED.findall(text)
    if not found:
        raise UsageError(f"{folder}: fairseq-generate did not print its speed; see its log")
    return float(found[-1][1])


def _train(folder):
    """Return the seconds per update: the median over some updates at the start of training."""
    with open(os.path.join(folder, "train.sh"), encoding="utf-8") as stream:
        words, _ = without_options(shlex.split(stream.read()), "init_from", "init_from_order", "stack_restart_updates")
    scratch = os.path.join(folder, "timing")
    own = ["--save-dir", scratch, "--no-save", "--disable-validation", "--max-update", str(UPDATES)]
    own += shorten(words)
    try:
        text = run([*words, *own, "--log-interval", "5"], folder, "training")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _median_step(text, folder)


def _median_step(text, folder):
    steps = [float(batch) / float(rate) for rate, batch in STEP.findall(text) if float(rate) > 0]
    if len(steps) < 2:
        raise UsageError(f"{folder}: fairseq-train logged too few steps for timing; see its log")
    return statistics.median(steps[1:])  # the first one includes start-up
