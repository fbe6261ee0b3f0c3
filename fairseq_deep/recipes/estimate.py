"""Cost estimates of a plan: disk and time, with warnings about small machines and small corpora."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Iterator

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.machine import count_cores

from .model import describe_exports
from .plan import Plan
from .text.corpus import find_text, read_lines

FLOPS = 5e10
"""Operations per second and core of a CPU, an optimistic estimate."""

H100 = (5.4e-6, 7.9e-8, 1e-4)
"""Seconds per token, per token and million parameters, and per update and million parameters: 6 + 6 layers have 61
million and 41.8 ms per step of 4,096 tokens, 30 + 6 layers 137 million, 66.3 ms and 13.8 ms per update."""


def describe(plan: Plan) -> Iterator[str]:
    """Yield the lines that describe a plan before it runs."""
    options, place = plan.options, plan.place
    note = "" if plan.product == options.batch_tokens else f", the job has {options.batch_tokens:,}"
    yield (f"recipe   {options.task}, {options.source_lang} to {options.target_lang}, {options.arch}, "
           f"conf {options.conf or 'none'}, {options.precision}")  # fmt: skip
    yield f"folder   {plan.exp}"
    yield f"data     {_data_words(plan)}"
    yield f"batch    {plan.batch_words()}{note}"
    if place.nnodes > 1:
        first = options.master or "the job's first"
        yield f"machines {place.nnodes} with {plan.processes} processes each; the first is {first}"
    if plan.seed_list:
        seeds, many = " ".join(map(str, plan.seed_list)), f"{options.jobs} at a time"
        queue = "SLURM jobs" if options.launcher == "slurm" else many if options.jobs > 1 else "one after the other"
        yield f"seeds    {seeds}: {queue}, each in the subdirectory seedN"
    yield f"disk     about {needed_gb(plan)} GB; {free_gb(plan.exp)} GB free"
    yield f"time     {'each seed: ' * bool(plan.seed_list)}{_time_words(plan)}"
    yield from (f"warning  {note}" for note in (*plan.notes, *_warnings(plan)))
    yield from filter(None, [describe_exports(plan.args)])


def needed_gb(plan: Plan) -> int:
    """Return the disk space in GB: the text once, also for several seeds, and the checkpoints of each seed."""
    options = plan.options
    if "disk_gb" in options.given:
        return options.disk_gb
    kept = options.average + 3  # the last one, the best one and the average
    own = min(options.disk_gb, math.ceil(12e-9 * _parameters(plan) * kept))  # weights and two moments in fp32
    text = 0 if options.start_from else options.disk_gb - own
    return text + own * max(1, len(plan.seed_list))


def free_gb(folder: str) -> int:
    """Return the free disk space at the existing or future *folder*, in GB."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free >> 30


def _data_words(plan: Plan) -> str:
    options = plan.options
    if plan.route == "download":
        if not plan.has_download:
            return "your text: --data DIR"
        return "fetched and rebuilt from its public parts" + f" at {options.data_url}" * bool(options.data_url)
    return {"demo": "the built-in corpus", "folder": options.data, "tar": options.data_tar}[plan.route]


def _job_updates(plan: Plan) -> int:
    """Return the number of updates; 0 if only the number of epochs is known."""
    return int(plan.train_value("--max-update") or plan.options.job_updates)


def _time_words(plan: Plan) -> str:
    """Describe the training time; the actual speed is printed with the progress."""
    total, hours, epochs = _job_updates(plan), plan.args.stop_time_hours, plan.args.max_epoch
    if hours > 0:
        return f"training ends after {60 * hours:.0f} minutes at the latest"
    if not total:
        if not epochs:
            return "training has no limit: stop it with Ctrl-C, or give --max-update"
        return f"training ends after {epochs} epochs; every progress line shows the time left"
    hours, tokens = _hours(plan), total * plan.product / 1e6
    lasts = f"{hours:,.0f} h" if hours >= 2 else f"{max(1, round(60 * hours)):,} min"
    device = f"{plan.devices} x H100 in fp16 or bf16 (from steps measured on one: docs/gpu.md)"
    device = device if plan.options.ngpu else "this CPU at best"
    return f"{total} updates = {tokens:,.{1 if tokens < 10 else 0}f} million tokens: about {lasts} on {device}"


def _hours(plan: Plan) -> float:
    """Estimate the training time on all GPUs, as measured on one H100 (docs/gpu.md), or on the CPU at full speed."""
    tokens, millions = _training_tokens(plan), _parameters(plan) / 1e6
    if plan.options.ngpu:
        step = H100[0] + H100[1] * millions
        return (tokens / plan.devices * step + _job_updates(plan) * H100[2] * millions) / 3600
    return 6e6 * millions * tokens / FLOPS / count_cores() / 3600  # 6 operations per parameter and token


def _warnings(plan: Plan) -> Iterator[str]:
    """Warn about a job for GPUs on a CPU, a large model with little text, and a training that ends in its warm-up."""
    options, advice = plan.options, "examples/own_text/run.sh"
    if options.smoke or not options.stage <= 4 <= options.stop_stage:
        return
    if ends_in_warmup(plan):
        yield f"{ends_in_warmup(plan)}: add a shorter --warmup-updates after --"
    if not options.ngpu and _hours(plan) >= 48 and not plan.args.stop_time_hours > 0:
        yield (f"training takes more than {int(_hours(plan)):,} hours on this CPU: use a GPU, or for your own text "
               f"{advice}")  # fmt: skip
    pairs = _count_pairs(plan) if plan.route == "folder" else 100_000
    if pairs < 100_000 and _parameters(plan) >= 50_000_000:
        yield f"{pairs:,} training pairs are few for a model of this size: {advice} has smaller ones"


def ends_in_warmup(plan: Plan) -> str:
    """Return a note if training has no more updates than its warm-up; otherwise ""."""
    updates, warmup = plan.args.max_update, getattr(plan.args, "warmup_updates", 0)
    if not 0 < updates <= warmup:
        return ""
    return f"training ends within its warm-up (--max-update {updates}, --warmup-updates {warmup})"


def _parameters(plan: Plan) -> int:
    """Estimate the number of parameters: matrices of attention and feed-forward sub-layers, and one embedding."""
    args, total = plan.args, plan.options.bpe_merges * plan.args.encoder_embed_dim
    for side, attentions in (("encoder", 1), ("decoder", 2)):
        layers, width, ffn = (getattr(args, f"{side}_{name}", 0) for name in ("layers", "embed_dim", "ffn_embed_dim"))
        total += layers * width * (4 * width * attentions + 2 * ffn)
    return total


def _training_tokens(plan: Plan) -> int:
    """Estimate the number of target tokens in training from the options; a sub-word has about 4 bytes."""
    total = _job_updates(plan)
    if total:
        return total * plan.product
    size = 0
    for end, factor in (("", 1), (".gz", 3)):
        path = os.path.join(plan.options.data, f"train.{plan.options.target_lang}{end}")
        if plan.route == "folder" and os.path.isfile(path):
            size = factor * os.path.getsize(path)
    return plan.args.max_epoch * size // 4


def _count_pairs(plan: Plan) -> int:
    """Count the lines of the training text, at most 100,000."""
    with contextlib.suppress(UsageError, OSError):  # the stage that reads the file reports the error
        if not plan.options.multilingual:
            path = find_text(plan.options.data, f"train.{plan.options.target_lang}")
            return sum(1 for _ in itertools.islice(read_lines(path), 100_000))
    return 100_000
