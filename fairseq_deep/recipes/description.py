"""Description of a plan before it runs, with warnings, and the free disk space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from .changes import ends_in_warmup
from .model import describe_exports
from .plan import Plan

FOR_GPUS = 16_000
"""Tokens per update from which a training is too slow for a CPU."""


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
    yield f"disk     {options.disk_gb} GB needed; {free_gb(plan.exp)} GB free"
    yield f"training {_length_words(plan)}"
    yield from (f"warning  {note}" for note in (*plan.notes, *_warnings(plan)))
    yield from filter(None, [describe_exports(plan.args)])


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
    return "the built-in corpus" if plan.route == "demo" else options.data


def _length_words(plan: Plan) -> str:
    """Describe the limits of training; the time left is printed with the progress."""
    updates, epochs, hours = plan.args.max_update, plan.args.max_epoch, plan.args.stop_time_hours
    limits = {f"{updates:,} updates": updates, f"{epochs} epochs": epochs, f"{60 * hours:.0f} minutes": hours}
    words = " or ".join(words for words, limit in limits.items() if limit > 0)
    return f"ends after {words}" if words else "has no limit: stop it with Ctrl-C, or give --max-update"


def _warnings(plan: Plan) -> Iterator[str]:
    """Warn about a job for GPUs on a CPU, and a training that ends in its warm-up."""
    options = plan.options
    if not options.stage <= 4 <= options.stop_stage:
        return
    if note := ends_in_warmup(plan.args):
        yield f"{note}: add a shorter --warmup-updates after --"
    if not options.ngpu and plan.product >= FOR_GPUS and not plan.args.stop_time_hours > 0:
        yield "this job is for GPUs, and takes weeks on a CPU: for your own text use examples/own_text/run.sh"
