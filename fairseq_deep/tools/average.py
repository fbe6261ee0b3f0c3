"""average checkpoints of one run (the last N, the best N, or the given files)

Each parameter is replaced by its mean over the checkpoints, summed in float64 and converted back to the stored
precision. Memory holds the sums and one checkpoint at a time. The result has the last input's configuration and task
state.
"""

import argparse
import os
import re
import sys
from typing import Any, NamedTuple

import torch

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.checkpoints import load_checkpoint, model_flags, save_checkpoint
from fairseq_deep.tools.output_files import check_outputs

EXAMPLE = "fairseq-deep average --last 5 --dir checkpoints --output averaged.pt"
KINDS = {
    "last": ("epoch checkpoints (checkpointE.pt)", re.compile(r"checkpoint(\d+)\.pt")),
    "last_updates": ("update checkpoints (checkpoint_E_U.pt)", re.compile(r"checkpoint_\d+_(\d+)\.pt")),
    "best": ("best checkpoints (checkpoint.best_METRIC_VALUE.pt)",
             re.compile(r"checkpoint\.best_(?P<metric>.+)_(-?\d+(?:\.\d+)?)\.pt")),
}  # fmt: skip
"""The choice of checkpoints: their kind, and the pattern of their names, which ends with the number of their order."""
DIRECTIONS = {True: re.compile(r"bleu|chrf|accuracy|comet|meteor|\b(acc|f1)\b"),
              False: re.compile(r"loss|ppl|perplexity|error|\b(ter|wer|cer)\b")}  # fmt: skip
"""Metrics of which a high value is better, or a low one."""
NOT_AVERAGED = ("version", "_float_tensor")
"""Buffers without a mean: a version number, and a tensor that fairseq never initialises (it may hold NaN)."""
STALE = ("ema", "ema_fp32_params")
"""Other averages of the weights; they would be outdated in the result."""
GROWS = ".residual.scale"
"""Suffix of the keys of growing branches' factors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of checkpoints and the output."""
    choice = parser.add_mutually_exclusive_group(required=True)
    count: dict[str, Any] = {"type": at_least_one, "metavar": "N"}
    choice.add_argument("--inputs", nargs="+", metavar="FILE", help="checkpoints to average")
    choice.add_argument("--last", **count, help="average the newest N epoch checkpoints (checkpointE.pt)")
    choice.add_argument("--last-updates", **count, help="average the newest N update checkpoints (checkpoint_E_U.pt)")
    choice.add_argument("--best", **count, help="average the best N checkpoints (checkpoint.best_METRIC_VALUE.pt)")
    parser.add_argument("--dir", metavar="DIR", help="directory for --last, --last-updates and --best")
    parser.add_argument("--output", required=True, metavar="FILE", help="averaged checkpoint to write")


def run(args: argparse.Namespace) -> int:
    """Choose the checkpoints, average them and write the result."""
    if (args.dir is None) == (args.inputs is None):
        raise UsageError("--last, --last-updates and --best require --dir DIR, --inputs does not support it: add or "
                         "omit --dir")  # fmt: skip
    found = args.inputs or _candidates(args)
    paths = args.inputs or found[-(args.last or args.last_updates or args.best) :]
    _check_paths(paths)
    check_outputs([args.output], found)
    state, size = average(paths)
    dropped = state.pop("last_optimizer_state", None) is not None
    save_checkpoint(state, args.output)
    names = ", ".join(args.inputs or map(os.path.basename, paths))
    note = "; without the optimizer state" if dropped else ""
    number = f"{len(paths)} checkpoint{'s' if len(paths) > 1 else ''}"
    print(f"averaged {number} ({printable(names, None)}; {size:,} values{note}) -> {printable(args.output, None)}")
    return 0


class Slot(NamedTuple):
    """What must be equal in all checkpoints: a description of the value, and the key of its mean ("": it has none)."""

    text: str
    owner: str


def average(paths: list[str]) -> tuple[dict[str, Any], int]:
    """Return the last checkpoint with the mean model of all checkpoints, and the number of averaged values.

    Tensors that share memory (tied embeddings) are summed once and stay tied.

    Raises:
        UsageError: a file is not a checkpoint, holds NaN or Inf, or differs from the first in keys, shapes or ties.
    """
    sums: dict[str, torch.Tensor] = {}
    layout = state = begun = model = value = None
    for index, path in enumerate(paths, 1):
        state = model = value = None  # frees the previous checkpoint before the next is read
        if sys.stderr.isatty():
            print(f"[{index}/{len(paths)}] {printable(path)}", file=sys.stderr)
        state = load_checkpoint(path)
        model, own = state["model"], _layout(state["model"])
        layout = layout or own
        _check_same(path, own, paths[0], layout)
        for key in [key for key, slot in layout.items() if slot.owner == key]:
            value = model[key].double()
            if not torch.isfinite(value).all():
                raise UsageError(f"{path} holds NaN or Inf in {key}; omit this checkpoint")
            # The first sum must be a copy, since double() returns a float64 tensor itself.
            sums[key] = sums[key].add_(value) if key in sums else value.clone()
        begun = _check_function(path, paths[0], state, begun)
    means = {key: (total / len(paths)).to(model[key].dtype) for key, total in sums.items()}
    model.update({key: means[slot.owner] for key, slot in layout.items() if slot.owner})
    extra = {key: value for key, value in (state.get("extra_state") or {}).items() if key not in STALE}
    state["extra_state"] = {**extra, "averaged_from": [os.path.basename(path) for path in paths]}
    return state, sum(total.numel() for total in sums.values())


def _layout(model: dict[str, Any]) -> dict[str, Slot]:
    layout: dict[str, Slot] = {}
    owners: dict[Any, str] = {}
    for key, value in model.items():
        if not torch.is_tensor(value):
            layout[key] = Slot("no tensor", "")
            continue
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (key,)
        owner, text = owners.setdefault(memory, key), "x".join(map(str, value.shape)) or "a scalar"
        averaged = value.is_floating_point() and key.rpartition(".")[2] not in NOT_AVERAGED
        text += " without a mean" * (not averaged) + f" tied to {owner}" * (owner != key)
        text = f"a factor of {float(value)}" if key.endswith(GROWS) and value.ndim == 0 else text
        layout[key] = Slot(text, owner if averaged else "")
    return layout


def _check_same(path: str, own: dict[str, Slot], first: str, layout: dict[str, Slot]) -> None:
    """Reject a checkpoint with another layout than the first; averaged weights fit none of two growing factors."""
    key = next((key for key in [*layout, *own] if layout.get(key) != own.get(key)), None)
    if key is not None:
        here, there = (each[key].text if key in each else "missing" for each in (own, layout))
        fix = "average checkpoints of one run"
        if key in own and key in layout and key.endswith(GROWS):
            fix = "average later checkpoints, when the branches of --residual branchnorm or prores no longer grow"
        raise UsageError(f"{path} does not fit {first}: {key} is {here} in it and {there} there; {fix}")


def _check_function(path: str, first: str, state: dict[str, Any], begun: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reject a model that computes another function than the first, or has other dictionaries or languages.

    Args:
        begun: flags and task state of the first, which this function returns; None: this one is the first
    """
    own, task = model_flags(state), state.get("task_state")
    task = task if isinstance(task, dict) else {}
    if begun is None:
        return own, task
    found = ""
    if own != begun[0]:
        from fairseq_deep.plugin.training.restart import differences

        found = differences(begun[0], own, os.path.basename(first))
    for name in ("dictionaries", "languages"):
        if None not in (task.get(name), begun[1].get(name)) and task[name] != begun[1][name]:
            found = found or f"other {name}"
    if found:
        raise UsageError(f"{path} does not fit {first}: {found}; average checkpoints of one run")
    return begun


def _candidates(args: argparse.Namespace) -> list[str]:
    """Return the checkpoints of the requested kind in the directory, in order."""
    if not os.path.isdir(args.dir):
        raise UsageError(f"--dir {args.dir}: no such directory; correct the path")
    names = sorted(os.listdir(args.dir))
    kinds = {kind: [*filter(None, map(pattern.fullmatch, names))] for kind, (_, pattern) in KINDS.items()}
    chosen = next(name for name in KINDS if getattr(args, name))
    number, found, higher = getattr(args, chosen), kinds[chosen], True
    if chosen == "best" and found:
        metrics = sorted({match["metric"] for match in found})
        if len(metrics) > 1:
            metrics = ", ".join(metrics)
            raise UsageError(f"{args.dir} has best checkpoints by different metrics ({metrics}); use --inputs")
        higher = _higher_is_better(os.path.join(args.dir, found[0][0]), metrics[0])
    found.sort(key=lambda match: float(match.groups()[-1]), reverse=not higher)
    if len(found) < number:
        listed = ", ".join(match[0] for match in found) or "none"
        more = [f"--{name.replace('_', '-')} {len(each)}" for name, each in kinds.items() if len(each) > len(found)]
        inner = os.path.join(args.dir, "checkpoints")
        more = more or [f"--dir {inner}"] * os.path.isdir(inner)
        fix = f"use {' or '.join(more)}" if more else "ask for fewer"
        raise UsageError(f"{args.dir} has {len(found)} of the {number} {KINDS[chosen][0]}: {listed}; {fix}")
    return [os.path.join(args.dir, match[0]) for match in found]


def _higher_is_better(path: str, metric: str) -> bool:
    """Return the direction of `metric`, from the run's configuration or, in old checkpoints, from its name."""
    state = load_checkpoint(path)
    config: Any = (state.get("cfg") or {}).get("checkpoint") or state.get("args") or {}
    saved: bool | None = (config if hasattr(config, "get") else vars(config)).get("maximize_best_checkpoint_metric")
    words = metric.lower().replace("_", " ")
    by_name = next((higher for higher, pattern in DIRECTIONS.items() if pattern.search(words)), None)
    if saved is None and by_name is None:
        raise UsageError(f"cannot tell whether a high or a low {metric} is better; name the checkpoints with --inputs")
    if saved is not None and by_name is not None and saved != by_name:
        direction = "high" if saved else "low"
        warning = f"the run was configured such that a {direction} {printable(metric)} is better"
        print(f"fairseq-deep average: warning: {warning}", file=sys.stderr)
    return by_name if saved is None else saved


def _check_paths(paths: list[str]) -> None:
    seen: dict[str, str] = {}
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(f"{path}: no such checkpoint; correct the path")
        if seen.setdefault(os.path.realpath(path), path) != path or paths.count(path) > 1:
            raise UsageError(f"{path} is given twice (same file as {seen[os.path.realpath(path)]}); name it once")
