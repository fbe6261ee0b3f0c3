"""Speed and BLEU of the systems of a comparison, in batches of 32 and one sentence at a time, as records.

    python benchmarks/speed_and_quality.py EXP --input news.en --references news.de --output FILE.jsonl

EXP is a directory of `compare` with its models; the first seed of each system is measured, with one thread. Its first
system also runs in stock fairseq and in CTranslate2, so it must be one that these support. All take turns, in fp32 and
in int8 (`decoding.py`). Use a machine without other work. FILE gets one line per system and test, "real" (batches) and
"real-one"; docs/results/records/decoding.jsonl has the same fields.
"""

import argparse
import json
import logging
import os
import shlex
import sys
import time

import decoding
import sacrebleu
from turns import describe_machine, median, speed

from fairseq_deep.errors import UsageError
from fairseq_deep.tools import results
from fairseq_deep.tools.input_text import read_lines

TESTS = {"real": (32, 10**6), "real-one": (1, 100)}
"""Sentences per batch, and sentences, of each test."""


def systems_of(folder):
    """Return {name in the record: system of `decoding`} for the comparison in *folder*, stock fairseq first."""
    runs = [next(iter(seeds.values())) for seeds in results.by_system(results.read(folder)).values()]
    if not runs:
        raise UsageError(f"{folder} has no finished run: give a directory of compare")
    models = {run["system"]: shlex.quote(os.path.join(folder, run["folder"])) for run in runs}
    first = models[runs[0]["system"]]
    programs = {"stock": f"stock {first}", "ctranslate2": f"ctranslate2 {first}", **models}
    int8 = {f"{name}-int8": f"{words} {decoding.INT8}" for name, words in programs.items() if name != "stock"}
    return {**programs, **int8}


def records(test, systems, turns, references, machine):
    """Yield a record for each of *systems*, ``{name: system}``, from the rounds that they took."""
    hardware, versions = machine.splitlines()
    for name, system in systems.items():
        rounds, found = turns[system], turns[system][-1][2]
        other = "ctranslate2-int8" if name.endswith("-int8") else "ctranslate2"
        yield {
            "test": test, "system": name, "seconds": median(rounds), "cpu_seconds": median(rounds, 1),
            "sentences_per_second": round(len(found) / median(rounds), 1),
            "of_stock": round(speed(turns[systems["stock"]], rounds), 3),
            "of_ctranslate2": round(speed(turns[systems[other]], rounds), 3),
            "bleu": round(sacrebleu.corpus_bleu([text for text, _ in found], [references]).score, 2),
            "command": shlex.join(["python", "benchmarks/speed_and_quality.py", *sys.argv[1:]]),
            "hardware": hardware, "versions": versions, "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="EXP")
    for name in ("input", "references", "output"):
        parser.add_argument(f"--{name}", required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(words)
    logging.disable(logging.INFO)
    machine = describe_machine()
    print(machine, flush=True)
    try:
        systems = systems_of(given.folder)
        for test, (batch, count) in TESTS.items():
            settings = decoding.read_arguments(["--input", given.input, "--systems", *systems.values()])
            settings.batch_size, settings.sentences, settings.rounds = batch, count, given.rounds
            references, (turns, problems) = read_lines(given.references)[:count], decoding.measure(settings)
            if problems:
                raise SystemExit(problems[0])
            print(f"\n{test}\n{decoding.report(turns, references)}", flush=True)
            with open(given.output, "a", encoding="utf-8") as stream:
                lines = records(test, systems, turns, references, machine)
                stream.writelines(json.dumps(line) + "\n" for line in lines)
    except UsageError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
