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

from fairseq_deep.errors import UsageError, printable
from fairseq_deep.tools.arguments import at_least_one
from fairseq_deep.tools.checkpoints import load_checkpoint, save_checkpoint
from fairseq_deep.tools.output_files import check_outputs

_EPOCH = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE = re.compile(r"checkpoint_(\d+)_(\d+)\.pt")
_BEST = re.compile(r"checkpoint\.best_(.+)_(-?\d+(?:\.\d+)?)\.pt")
_HIGHER_IS_BETTER = re.compile(r"bleu|chrf|accuracy|comet|meteor|\b(acc|f1)\b")
_LOWER_IS_BETTER = re.compile(r"loss|ppl|perplexity|error|\b(ter|wer|cer)\b")
# Buffers without a mean: a version number, and a tensor that fairseq never initialises (it may hold NaN).
_NOT_AVERAGED = ("version", "_float_tensor")


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


def average(paths: list[str]) -> tuple[dict[str, Any], int]:
    """Return the last checkpoint with the mean model of all checkpoints, and the number of averaged values.

    Raises:
        UsageError: a file is not a checkpoint, holds NaN or Inf, or differs from the first in keys, shapes or ties.
    """
    mean = RunningMean()
    state = flags = None
    for index, path in enumerate(paths, 1):
        state = None  # frees the previous checkpoint before the next is read
        if sys.stderr.isatty():
            print(f"[{index}/{len(paths)}] {printable(path)}", file=sys.stderr)
        state = load_checkpoint(path)
        mean.add(path, state["model"])
        flags = _check_function(path, paths[0], state, flags)
    mean.write_to(state["model"])
    extra = {key: value for key, value in (state.get("extra_state") or {}).items() if key not in STALE}
    state["extra_state"] = {**extra, "averaged_from": [os.path.basename(path) for path in paths]}
    return state, mean.size


def _check_function(path: str, first: str, state: dict[str, Any], flags: dict[str, Any] | None) -> dict[str, Any]:
    """Reject a model with the shapes of the first, with *flags*, that computes another function; return the flags."""
    from fairseq_deep.plugin.compat import model_flags

    own = model_flags(state)
    if flags is not None and own != flags:
        from fairseq_deep.plugin.training.restart import differences

        found = differences(flags, own, os.path.basename(first))
        if found:
            raise UsageError(f"{path} does not fit {first}: {found}; average checkpoints of one run")
    return own if flags is None else flags


STALE = ("ema", "ema_fp32_params")
"""Other averages of the weights; they would be outdated in the result."""


GROWS = ".residual.scale"
"""Suffix of the keys of growing branches' factors."""


class Slot(NamedTuple):
    """Properties of one key of the model, which must be equal in all checkpoints."""

    shape: str
    averaged: bool
    owner: str  # the first key with the same memory: the key itself, unless it is tied to another one


class RunningMean:
    """Mean of the models of several checkpoints, added one by one.

    Tensors that share memory (tied embeddings) are summed once and stay tied.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_path = ""
        self.layout: dict[str, Slot] = {}
        self.sums: dict[str, Any] = {}
        self.growing: dict[str, float] = {}

    @property
    def size(self) -> int:
        """Number of averaged values."""
        return sum(total.numel() for total in self.sums.values())

    def add(self, path: str, model: dict[str, Any]) -> None:
        """Add the tensors of `model`, which was read from `path`."""
        import torch

        layout = _layout(model)
        if self.count == 0:
            self.first_path, self.layout = path, layout
        self._check_same(path, layout)
        self._check_grown(path, model)
        for key, slot in layout.items():
            if slot.averaged and slot.owner == key:
                value = model[key].double()
                if not torch.isfinite(value).all():
                    raise UsageError(f"{path} holds NaN or Inf in {key}; omit this checkpoint")
                # The first sum must be a copy, since double() returns a float64 tensor itself.
                self.sums[key] = self.sums[key].add_(value) if self.count else value.clone()
        self.count += 1

    def write_to(self, model: dict[str, Any]) -> None:
        """Write the means to `model`, the last one added, in its precision; tensors without a mean do not change."""
        means = {key: (total / self.count).to(model[key].dtype) for key, total in self.sums.items()}
        for key, slot in self.layout.items():
            if slot.averaged:
                model[key] = means[slot.owner]

    def _check_grown(self, path: str, model: dict[str, Any]) -> None:
        """Reject branches with factors that grow between checkpoints: averaged weights fit none of these factors."""
        for key, value in model.items():
            if not key.endswith(GROWS) or getattr(value, "ndim", None) != 0:
                continue
            if float(value) != self.growing.setdefault(key, float(value)):
                raise UsageError(
                    f"{path} and {self.first_path} are from updates during which the branches of --residual branchnorm "
                    f"or prores grow ({key}): average later checkpoints"
                )

    def _check_same(self, path: str, layout: dict[str, Slot]) -> None:
        for key in [*self.layout, *layout]:
            first, this = self.layout.get(key), layout.get(key)
            if first == this:
                continue
            if this is None:
                problem = f"{key} is missing in it"
            elif first is None:
                problem = f"{key} is only in it"
            elif first.shape != this.shape:
                problem = f"{key} is {this.shape} in it and {first.shape} there"
            else:
                problem = f"{key} has another type, or is tied to another tensor"
            raise UsageError(f"{path} does not fit {self.first_path}: {problem}; average checkpoints of one run")


def _layout(model: dict[str, Any]) -> dict[str, Slot]:
    import torch

    owners: dict[tuple, str] = {}
    layout = {}
    for key, value in model.items():
        if not torch.is_tensor(value):
            layout[key] = Slot("no tensor", False, key)
            continue
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (key,)
        averaged = value.is_floating_point() and key.rpartition(".")[2] not in _NOT_AVERAGED
        layout[key] = Slot("x".join(map(str, value.shape)) or "scalar", averaged, owners.setdefault(memory, key))
    return layout


def _candidates(args: argparse.Namespace) -> list[str]:
    """Return the checkpoints of the requested kind in the directory, in order."""
    if not os.path.isdir(args.dir):
        raise UsageError(f"--dir {args.dir}: no such directory; correct the path")
    kinds = {
        "last": ("epoch checkpoints (checkpointE.pt)", lambda folder: _by_number(folder, _EPOCH)),
        "last_updates": ("update checkpoints (checkpoint_E_U.pt)", lambda folder: _by_number(folder, _UPDATE)),
        "best": ("best checkpoints (checkpoint.best_METRIC_VALUE.pt)", _by_value),
    }
    chosen = next(name for name in kinds if getattr(args, name))
    number, (kind, find) = getattr(args, chosen), kinds[chosen]
    found = find(args.dir)
    if len(found) < number:
        names = ", ".join(os.path.basename(path) for path in found) or "none"
        others = {f"--{name.replace('_', '-')}": len(find(args.dir)) for name, (_, find) in kinds.items()}
        more = [f"{flag} {count}" for flag, count in others.items() if count > len(found)]
        inner = os.path.join(args.dir, "checkpoints")
        more = more or [f"--dir {inner}"] * os.path.isdir(inner)
        fix = f"use {' or '.join(more)}" if more else "ask for fewer"
        raise UsageError(f"{args.dir} has {len(found)} of the {number} {kind}: {names}; {fix}")
    return found


def _by_number(folder: str, pattern: re.Pattern) -> list[str]:
    """Return the files that match `pattern`, ordered by the last number in their names, newest last."""
    matches = [match for match in map(pattern.fullmatch, os.listdir(folder)) if match]
    return [os.path.join(folder, match[0]) for match in sorted(matches, key=lambda match: int(match.groups()[-1]))]


def _by_value(folder: str) -> list[str]:
    """Return the best checkpoints in the order of the values in their names, best last."""
    matches = [match for match in map(_BEST.fullmatch, sorted(os.listdir(folder))) if match]
    metrics = sorted({match[1] for match in matches})
    if len(metrics) > 1:
        raise UsageError(f"{folder} has best checkpoints by different metrics ({', '.join(metrics)}); use --inputs")
    if not matches:
        return []
    higher = _higher_is_better(os.path.join(folder, matches[0][0]), metrics[0])
    matches.sort(key=lambda match: float(match[2]), reverse=not higher)
    return [os.path.join(folder, match[0]) for match in matches]


def _higher_is_better(path: str, metric: str) -> bool:
    """Return the direction of `metric`, from the run's configuration or, in old checkpoints, from its name."""
    state = load_checkpoint(path)
    config: Any = (state.get("cfg") or {}).get("checkpoint") or state.get("args")
    if isinstance(config, argparse.Namespace):
        config = vars(config)
    saved: bool | None = (config or {}).get("maximize_best_checkpoint_metric")
    words = metric.lower().replace("_", " ")
    by_name = True if _HIGHER_IS_BETTER.search(words) else False if _LOWER_IS_BETTER.search(words) else None
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
        if not os.path.isfile(path):
            raise UsageError(f"{path}: no such checkpoint; correct the path")
        if seen.setdefault(os.path.realpath(path), path) != path or paths.count(path) > 1:
            raise UsageError(f"{path} is given twice (same file as {seen[os.path.realpath(path)]}); name it once")
