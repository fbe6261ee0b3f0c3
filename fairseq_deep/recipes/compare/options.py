"""The options of a comparison and the resolution of "auto"."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from fairseq_deep.errors import UsageError
from fairseq_deep.recipes import driver as recipes
from fairseq_deep.recipes import seeds
from fairseq_deep.recipes.changes import LENGTHS, scaled
from fairseq_deep.recipes.options import (
    AUTO,
    AUTO_COUNT,
    COUNT,
    FILE,
    FOLDER,
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
from fairseq_deep.recipes.recipe import PRECISIONS
from fairseq_deep.tools import flags_of

from . import depth

SIZE = "; auto: as in the size"
PASSED = ("max_tokens", "update_freq", "batch_tokens", "force_batch", "precision", "embeddings", "bpe_merges",
          "vocab_threshold", "max_words", "average", "beam", "lenpen", "gen_batch", "disk_gb")  # fmt: skip
"""Options that are passed to the recipe if given; the defaults depend on the recipe and on the size."""


@dataclass
class Compare(Options):
    """The options of a comparison."""

    argument_name, argument_help = "SYSTEM", "NAME, 'NAME FLAGS' or 'LABEL=NAME FLAGS'"

    dry_run: bool = option(False, SWITCH, "check all options, print the plan and change nothing")
    table_only: bool = option(False, SWITCH, "write table and picture of existing results without training")
    systems: str = option("", FILE, "file with one system per line, in addition to the command line")
    seeds: str = option("1", TEXT, "random seeds of all systems: a number such as 3 (seeds 1, 2 and 3), or a list such "
                        "as 4,7")  # fmt: skip
    updates: int | str = option("auto", AUTO, f"updates of all training runs{SIZE}")
    depths: str = option("", TEXT, "encoder layers of all systems, such as 6,12,24; tests whether depth pays")
    tune: str = option("none", one_of("none", "lr"), "lr: search the learning rate of each system first")
    tune_updates: int | str = option("auto", AUTO_COUNT, "updates of the search; auto: as --updates")
    tune_seed: int = option(1000, WHOLE, "seed of the search; the final runs must not use it")
    jobs: int = option(1, COUNT, "number of simultaneous training runs; with --launcher slurm, all by default")
    launcher: str = option("local", one_of("local", "slurm"), "local: train on this machine; slurm: submit each "
                           "training run as a job")  # fmt: skip
    slurm: str = option("", TEXT, "options of sbatch for each job, such as 'partition=gpu account=lab'")
    slurm_hours: str = option("24", NUMBER, "time limit of a job in hours; an unfinished run is requeued")
    exp: str = option("auto", FOLDER, "directory of the experiment; auto: exp/compare-CONF in the repository")
    tables: str = option(
        "", FOLDER, "directory for table and picture; none: the experiment's, and the table is printed"
    )
    conf: str = option("mini", one_of("mini", "base"), "size: mini (width 128, a CPU) or base (width 512, a GPU)")
    width: int | str = option("auto", AUTO, f"width of all systems, with 4 x width in feed-forward layers{SIZE}; 0: "
                              "the architecture's")  # fmt: skip
    heads: int | str = option("auto", AUTO, f"number of attention heads{SIZE}, or width / 32 with --width")
    translate: bool = option(True, SWITCH, "translate and score the test set; false: compare losses only")
    bootstrap: int = option(1000, WHOLE, "resamples of the paired bootstrap; 0: no bootstrap")
    data: str = option("", FOLDER, "directory with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz")
    data_tar: str = option("", FILE, "Google's pre-processed wmt16_en_de.tar.gz")
    demo: bool = option(False, SWITCH, "use the small built-in corpus")
    source_lang: str = option("en", TEXT, "source language")
    target_lang: str = option("de", TEXT, "target language")
    ngpu: int | str = option(
        "auto", AUTO, "GPUs per training run; 0: the CPU; auto: all visible GPUs, divided by --jobs"
    )
    workers: int | str = option("auto", AUTO_COUNT, "processes for text preparation; auto: the number of cores")
    max_tokens: int | str = option("auto", AUTO, f"tokens per device and step{SIZE}")
    update_freq: int | str = option("auto", AUTO, "steps per update; auto: for the size's tokens per update")
    batch_tokens: int | str = option("auto", AUTO, f"tokens per update{SIZE}")
    force_batch: bool = option(False, SWITCH, "accept another number of tokens per update than the size's")
    precision: str = option("fp32", PRECISIONS, "fp32, fp16, bf16 or amp")
    embeddings: str = option("all", one_of("all", "target"),
                             "shared embeddings: source, target and output, or target and output")  # fmt: skip
    bpe_merges: int | str = option("auto", AUTO, f"number of merges of the joint BPE{SIZE}")
    vocab_threshold: int = option(0, WHOLE, "minimum frequency of sub-words in the vocabulary")
    max_words: int = option(250, COUNT, "maximum length of training sentences in words")
    average: int | str = option("auto", AUTO, f"number of last epochs to average{SIZE} (1: only the last checkpoint)")
    beam: int = option(4, COUNT, "beam width")
    lenpen: str = option("0.6", NUMBER, "length penalty")
    gen_batch: int = option(32, COUNT, "sentences per batch when translating")
    disk_gb: int | str = option("auto", AUTO, f"required free disk space, in GB{SIZE}")


# width, heads, updates, epochs to average
SIZES = {"mini": (128, 4, 2000, 1), "base": (512, 8, 15000, 3)}
SCALES = "the scales of warm-up and search"
# options that may change within an experiment
FREE = ("--data", "--data-tar", "--workers", "--force-batch", "--disk-gb", "--subsets")


def check_options(options: Compare) -> None:
    """Reject invalid options, and options without effect, that can be detected without packages."""
    if options.width == 0 and "heads" in options.given:
        raise UsageError("--heads has no effect with --width 0: omit it, or give a width")
    for name in ("tune_updates", "tune_seed"):
        if name in options.given and options.tune == "none":
            raise UsageError(f"{flag_of(name)} has no effect without --tune lr: add that, or omit {flag_of(name)}")
    for name in ("slurm", "slurm_hours"):
        if name in options.given and options.launcher != "slurm":
            flag = flag_of(name)
            raise UsageError(f"{flag} has no effect without --launcher slurm: add that, or omit {flag}")
    if options.launcher == "slurm" and "ngpu" not in options.given:
        raise UsageError("--launcher slurm requires --ngpu, the number of GPUs of each job: give it, or 0 for the CPU")
    if not (options.data or options.data_tar or options.demo):
        langs = f"{options.source_lang},{options.target_lang}"
        raise UsageError(f"--data is missing: give a directory with {{train,valid,test}}.{{{langs}}}, plain or .gz (or "
                         "--demo)")  # fmt: skip


def resolve(options: Compare) -> None:
    """Resolve "auto", and collect the words for the recipe."""
    if options.exp == "auto":
        options.exp = os.path.join(ROOT, "exp", f"compare-{options.conf}")
    options.exp = os.path.abspath(options.exp)
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
    options.depths = depth.parse(options.depths) if options.depths else []
    if options.tune_updates == "auto":
        options.tune_updates = options.updates  # half a run can favour another rate
    if options.tune != "none" and options.tune_seed in options.seeds:
        raise UsageError(f"--tune-seed {options.tune_seed} must not be in --seeds: change one of them")
    each = max(1, options.devices // options.jobs) if options.devices else 0
    options.ngpu = each if options.ngpu == "auto" else options.ngpu
    if not options.devices or not options.ngpu:  # simultaneous training runs share the cores
        recipes.share_cores(options.jobs)


def resolve_schedule(args, old):
    """Scale the warm-up to fewer updates than the size's, and the search's schedule to the search.

    Args:
        old: conditions of the existing directory, whose scales remain if more updates are asked for

    Sets ``scales`` (of the runs and of the search) and ``schedule`` (flags after all others).
    """
    whole = SIZES[args.conf][2]
    if "--warmup-updates" in flags_of(args.extra):
        whole = args.updates
    scales = [min(1, args.updates / whole), min(1, args.tune_updates / args.updates)]
    args.scales = old.get(SCALES, [1, 1]) if old else scales
    words = [*Plan(recipes.read_options("compare", args.recipe)).conf_flags, *args.extra]
    args.schedule = scaled(words, args.scales[0], LENGTHS[:1])
    args.warmup = flags_of(words).get(LENGTHS[0])
    args.tune_schedule = scaled([*words, *args.schedule], args.scales[1]) or args.schedule


def conditions(args):
    """Return the options that all systems of one directory share."""
    pairs = dict(zip(args.recipe[::2], args.recipe[1::2]))
    known = {flag: value for flag, value in pairs.items() if flag not in FREE}
    known.update({"--updates": args.updates, "--width": args.width, "--heads": args.heads})
    if args.tune != "none":
        known.update({"--tune": args.tune, "--tune-updates": args.tune_updates, "--tune-seed": args.tune_seed})
    if args.scales != [1, 1]:
        known[SCALES] = args.scales
    return {**known, "the flags after the lone --": shlex.join(args.extra)}  # a key of conditions.json
