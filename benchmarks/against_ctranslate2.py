"""Decoding on a CPU: stock fairseq, this package and CTranslate2 with the same weights, in turns.

    pip install ctranslate2==4.8.5
    python benchmarks/against_ctranslate2.py [--threads 1 2] [--rounds 5]        random sentences, a fixed length
    python benchmarks/against_ctranslate2.py --table methods                     with the other decoders of this package
    python benchmarks/against_ctranslate2.py --table depth                       DLCL-30 beside Transformer-Big
    python benchmarks/against_ctranslate2.py --data BINARISED --checkpoint FILE  real text, with BLEU
    python benchmarks/against_ctranslate2.py --data BINARISED --checkpoint FILE --also matt=FILE --systems ours matt

Systems: a model, and after a hyphen its precision, fp32 unless it is named (ours-int8, dlcl-bf16, ctranslate2-int8).
stock, ours and ctranslate2 have the same weights. Ours go the way of `fairseq-generate --task deep_translation`: the
task's generator over a model that is prepared for inference. On real text the checkpoint is that of a plain model of
this package, which stock fairseq and CTranslate2 get through `fairseq-deep export`; --sentences takes about as many,
in whole batches of all lengths.

What is timed is the search over all batches, sources in and hypotheses out; neither loading nor BPE. Each system has a
process of its own, and one of them works at a time; the first round only warms up. Seconds are medians, speeds medians
of the ratios within the rounds; CPU seconds are the process's, on all threads. On a machine with other work, two
threads lose their time waiting for each other, and such figures mean nothing.

Hypotheses: on random sentences the share of stock's, of the whole beam, that a system has too; on real text the share
of sentences with the same best one. BLEU is sacrebleu's on tokenised text (``tokenize="none"``), without BPE.

What CTranslate2 does otherwise, and cannot be made equal: benchmarks/against/ctranslate2_system.py.
"""

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import tempfile
from importlib import metadata

import torch
from against.ctranslate2_system import CTranslate2System
from against.fairseq_systems import FairseqSystem, configure, longest, read_corpus, split_name, write_dictionaries
from against.turns import Turns
from fairseq import tasks

from fairseq_deep import cli as tool
from fairseq_deep.errors import UsageError
from fairseq_deep.tools import export
from fairseq_deep.tools.machine import count_cores, describe_cpu
from fairseq_deep.tools.tables import format_table

PRECISIONS = ("fp32", "bf16", "int8")
SAME_WEIGHTS = ("stock", "ours", "ctranslate2")
RANDOM = (*SAME_WEIGHTS, "dlcl", "lstm", "merged", "average", "modern", "dlcl30")
DEFAULT = ("stock", "ours", "ours-bf16", "ours-int8", "ctranslate2", "ctranslate2-int8")
TABLES = {
    "shape": {"systems": DEFAULT, "dim": 256, "vocabulary": 8000, "sentences": 32},
    "methods": {
        "systems": (*DEFAULT, *(f"{name}{end}" for name in RANDOM[3:8] for end in ("", "-int8"))),
        "dim": 256,
        "vocabulary": 8000,
        "sentences": 32,
    },
    "depth": {
        "systems": (*DEFAULT, "dlcl30", "dlcl30-bf16", "dlcl30-int8"),
        "dim": 1024,
        "vocabulary": 32000,
        "sentences": 32,
    },
}


def make(system, settings):
    """In the process of *system*: what translates."""
    return (CTranslate2System if system.startswith("ctranslate2") else FairseqSystem)(system, settings)


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", choices=TABLES, default="shape", help="systems and sizes of random models")
    parser.add_argument("--systems", nargs="+", metavar="NAME[-PRECISION]")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    numbers = {"dim": None, "layers": 6, "vocabulary": None, "sentences": None, "length": 26, "beam": 4, "rounds": 5}
    for name, value in {**numbers, "batch-size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("max-len-a", 1.0), ("max-len-b", 50), ("lenpen", 0.6)):
        parser.add_argument(f"--{name}", type=type(value), default=value, help="on real text, as for fairseq-generate")
    parser.add_argument("--data", help="a folder of fairseq-preprocess: real text")
    parser.add_argument("--checkpoint", help="a plain model of this package, for stock, ours and ctranslate2")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME=CHECKPOINT", help="models with other weights")
    parser.add_argument("--gen-subset", default="test")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what speeds are by (cpu: 1 thread)")
    settings = parser.parse_args(words)
    for name, value in TABLES[settings.table].items():
        if getattr(settings, name) is None and not (settings.data and name == "sentences"):
            setattr(settings, name, value)
    settings.device, settings.min_len, settings.real = "cpu", 1, bool(settings.data)
    settings.checkpoint = {name: settings.checkpoint for name in ("stock", "ours") if settings.checkpoint}
    settings.checkpoint.update(pair.partition("=")[::2] for pair in settings.also)
    if settings.real != bool(settings.checkpoint):
        parser.error("real text needs both --data and --checkpoint")
    if not settings.real:
        settings.max_len_a, settings.max_len_b, settings.min_len = 0, settings.length, settings.length
        settings.batch_size = settings.sentences
    check_systems(parser, settings)
    return settings


def check_systems(parser, settings):
    known = {*settings.checkpoint, "ctranslate2"} if settings.real else RANDOM
    for system in settings.systems:
        name, precision = split_name(system)
        if name not in known or precision not in PRECISIONS or (name == "stock" and precision != "fp32"):
            parser.error(f"no system {system}: one of {', '.join(sorted(known))}, with -bf16 or -int8 but for stock")


def describe_machine():
    """What the figures depend on, in two lines."""
    model, instructions = describe_cpu()
    packages = ["torch", "fairseq", "ctranslate2"]
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    versions.append(f"commit {commit or 'unknown'}")
    state = f"{count_cores()} cores, load {os.getloadavg()[0]:.1f} before"
    if "OMP_WAIT_POLICY" in os.environ:
        state += f", OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}"
    return f"{model} ({' '.join(instructions)}), {state}\n{', '.join(versions)}"


def measure(settings):
    """Let the systems take turns: {system: [seconds]}, {system: [CPU seconds]}, {system: hypotheses}."""
    seconds, used, hypotheses = ({system: [] for system in settings.systems} for _ in range(3))
    with Turns(make, settings.systems, settings) as turns:
        for number in range(settings.rounds + 1):
            for system in settings.systems:
                wall, cpu, hypotheses[system] = turns.ask(system)
                if number:  # the first warms up
                    seconds[system].append(wall)
                    used[system].append(cpu)
    return seconds, used, hypotheses


def speed(seconds, base, system):
    if base not in seconds:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(seconds[base], seconds[system])):.3f}"


def share_of(first, second, real):
    """Share of the hypotheses in *first* that *second* has for the same sentence: of the best, or of all."""
    if real:
        return sum(second[index][:1] == beam[:1] for index, beam in first.items()) / len(first)
    pairs = [(hypothesis, second[index]) for index, beam in first.items() for hypothesis in beam]
    return sum(hypothesis in beam for hypothesis, beam in pairs) / len(pairs)


class Scorer:
    """BLEU of a subset, of tokenised text without BPE."""

    def __init__(self, settings):
        config = configure(settings.systems[0], settings, settings.data)
        task = tasks.setup_task(config.task)
        self.dictionary, self.mark = task.target_dictionary, config.common_eval.post_process
        self.references, self.longest = {}, {}
        for sample in read_corpus(config, settings, task):
            for index, target in zip(sample["id"].tolist(), sample["target"]):
                words = target[target.ne(self.dictionary.pad())]
                self.longest[index] = longest(settings, sample)
                self.references[index] = self.dictionary.string(words, self.mark, escape_unk=True)

    def cut(self, hypotheses):
        """How many of the best hypotheses are as long as allowed."""
        return sum(len(beam[0]) >= self.longest[index] for index, beam in hypotheses.items())

    def bleu(self, hypotheses):
        import sacrebleu

        found = [self.dictionary.string(torch.tensor(beam[0]), self.mark) for beam in hypotheses.values()]
        references = [self.references[index] for index in hypotheses]
        return sacrebleu.corpus_bleu(found, [references], tokenize="none", force=True).score


def report(settings, seconds, used, hypotheses, scorer):
    base = "stock" if "stock" in seconds else settings.systems[0]
    clock = seconds if settings.clock == "wall" else used
    head = ["system", "seconds", "CPU seconds", "sentences/s", f"{base} = 1", "ctranslate2 = 1", f"{base}'s hypotheses"]
    rows = [head + ["BLEU"] * bool(scorer)]
    for system, values in seconds.items():
        name, precision = split_name(system)
        rival = "ctranslate2" if precision == "fp32" else f"ctranslate2-{precision}"
        row = [system, f"{statistics.median(values):.3f}", f"{statistics.median(used[system]):.3f}"]
        row += [f"{len(hypotheses[system]) / statistics.median(values):.1f}"]
        row += [speed(clock, base, system), speed(clock, rival, system)]
        same = name in SAME_WEIGHTS and split_name(base)[0] in SAME_WEIGHTS
        row += [f"{share_of(hypotheses[base], hypotheses[system], settings.real):.1%}" if same else "-"]
        rows.append(row + [f"{scorer.bleu(hypotheses[system]):.2f}" for _ in range(bool(scorer))])
    table = format_table(rows, right=range(1, 8))
    if not scorer:
        return table
    found = hypotheses[base]
    return f"{table}\n{scorer.cut(found)} of {base}'s {len(found)} hypotheses are as long as allowed, and cut there"


def export_plain(settings, folder):
    """Give stock fairseq, and through it CTranslate2, the checkpoint as they know it."""
    if not settings.real or not any(split_name(system)[0] in ("stock", "ctranslate2") for system in settings.systems):
        return
    exported = os.path.join(folder, "stock.pt")
    try:
        with contextlib.redirect_stdout(None):
            export.run(tool.parse(["export", settings.checkpoint["stock"], "--output", exported]))
    except UsageError as error:
        raise SystemExit(str(error)) from None
    settings.checkpoint["stock"] = exported


def main(words=None):
    settings = read_arguments(words)
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        export_plain(settings, folder)
        if not settings.real:
            settings.data = folder
            write_dictionaries(folder, settings.vocabulary)
        scorer = Scorer(settings) if settings.real else None
        for threads in settings.threads:
            results = measure(argparse.Namespace(**{**vars(settings), "threads": threads}))
            print(f"\nthreads: {threads}\n{report(settings, *results, scorer)}", flush=True)


if __name__ == "__main__":
    main()
