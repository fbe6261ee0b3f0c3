"""``--init-from``: a new model starts with the weights of a trained one that is shallower, or as deep.

A deeper stack is the old one with its layers repeated, in blocks or interleaved (``--init-from-order``). Blocks are
whole stacks first and then its top layers:

    6 layers -> 12    1 2 3 4 5 6  1 2 3 4 5 6                              interleaved: 1 1 2 2 3 3 4 4 5 5 6 6
             ->  8    1 2 3 4 5 6  5 6                                                   1 1 2 3 4 4 5 6
             -> 20    1 2 3 4 5 6  1 2 3 4 5 6  1 2 3 4 5 6  5 6

The first is the stacking of Gong et al. (2019). The first two are the shallow-to-deep training of Li et al. (2020),
which puts the top layers of a trained encoder on it once more. The bottom layers stay where they were, and the top one
is again what the final norm and the other stack have learned to read. Where a branch has the factor 1/L, doubling L
halves it. Then interleaved layers compute x + F/2 + F/2 for x + F, nearly the same function.
"""

import argparse
import contextlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from fairseq_deep.core.checkpoints import upgrade
from fairseq_deep.core.checks import check_numbers
from fairseq_deep.core.description import SIDES, describe
from fairseq_deep.core.layers.base_layer import has_norms
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from fairseq_deep.errors import one_line
from fairseq_deep.plugin.compat import load_checkpoint, model_flags

from .dictionaries import KEY, hash_symbols, sums

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_NO_WEIGHTS = ("version", "_float_tensor")
ORDERS = ("block", "interleave")
LANGUAGES = dict(zip(SIDES, ("source", "target")))
BINARISE = "binarise with its own (fairseq-preprocess --srcdict, --tgtdict)"


def take_path(args: Any) -> str | None:
    """The value of ``--init-from``, which is taken out of the flags: checkpoints are not to depend on that file."""
    path = getattr(args, "init_from", None)
    if path is not None:
        if OmegaConf.is_config(args):
            with open_dict(args):
                args.init_from = None
        else:
            args.init_from = None
    return path


def repeated_layers(old: int, new: int, order: str = "block") -> list[int]:
    """Which of *old* layers each of *new* ones takes, at least as many; counted from 0."""
    if order == "interleave":
        return [index * old // new for index in range(new)]
    top = (new - old) % old
    return [index % old for index in range(new - top)] + list(range(old - top, old))


@dataclass
class Source:
    """A trained model.

    Attributes:
        path: its checkpoint
        arch: its architecture
        weights: its parameters by their names of today
        stacks: their descriptions, by side
        dictionaries: "source" and "target", as far as they are known, as :func:`sums` has them
    """

    path: str
    arch: str
    weights: dict[str, Tensor]
    stacks: dict[str, Stack]
    dictionaries: dict[str, str]

    def refuse(self, problem: str) -> UsageError:
        return UsageError(f"--init-from {self.path}: {problem}")


def initialise_from(
    model: nn.Module, path: str, stacks: dict[str, Stack], task: Any, allow_other: bool, order: str = "block"
) -> None:
    """Fill the parameters of *model*, described by *stacks*, with those of the checkpoint at *path* that it has.

    Args:
        allow_other: take those of other dictionaries of the same sizes
        order: of repeated layers, one of `ORDERS`

    Raises:
        UsageError: the checkpoint is of another shape, of another vocabulary, or deeper
    """
    source = _read(path, model, task)
    if model.waiting:
        raise source.refuse("--admin-start profile measures a fresh model: use another --admin-start")
    for side in SIDES:
        _check_stack(source, source.stacks[side], stacks[side])
    checked = _check_words(source, task, allow_other)
    own = {name: value for name, value in model.state_dict().items() if name.rsplit(".", 1)[-1] not in _NO_WEIGHTS}
    layers = {side: repeated_layers(source.stacks[side].layers, stacks[side].layers, order) for side in SIDES}
    taken = _choose(source, own, stacks, layers)
    _check_shared(source, own, taken)
    for name, value in taken.items():
        own[name].copy_(source.weights[value])
    _tell(source, own, taken, layers, checked)


def _read(path: str, model: nn.Module, task: Any) -> Source:
    """The checkpoint at *path*."""
    try:
        state = load_checkpoint(path)
    except Exception as error:  # whatever a damaged or refused file raises
        raise UsageError(f"--init-from {path}: cannot load it ({one_line(error)})") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UsageError(f"--init-from {path}: it is not a fairseq checkpoint (it has no 'model')")
    flags, weights = argparse.Namespace(**model_flags(state)), dict(state["model"])
    arch = getattr(flags, "arch", None) or getattr(flags, "_name", None)
    known = ARCH_MODEL_REGISTRY.get(arch)
    if known is not TransformerModel and not isinstance(model, known or ()):
        raise UsageError(f"--init-from {path}: it is a model {arch}, neither one of this package nor a transformer")
    flags._name = arch  # which tells flags of a checkpoint from those of a command line
    try:
        ARCH_CONFIG_REGISTRY[arch](flags)
        check_numbers(flags)
        stacks = describe(flags)
    except Exception as error:  # settings of any kind set off what they like in fairseq
        reason = one_line(error)
        raise UsageError(f"--init-from {path}: no model can be built of its settings ({reason})") from error
    upgrade(model, weights)
    return Source(path, arch, weights, stacks, _find_dictionaries(path, state, task))


def _find_dictionaries(path: str, state: dict[str, Any], task: Any) -> dict[str, str]:
    """Hashes of the dictionaries of a checkpoint, from itself or from files next to it."""
    found = dict((state.get("task_state") or {}).get(KEY) or {})
    old = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    old = dict(old if hasattr(old, "keys") else vars(old))
    for name in LANGUAGES.values():
        language = old.get(f"{name}_lang") or getattr(getattr(task, "cfg", None), f"{name}_lang", None)
        file = os.path.join(os.path.dirname(path), f"dict.{language}.txt")
        if name not in found and os.path.isfile(file):
            with contextlib.suppress(Exception):  # it is no dictionary
                found[name] = hash_symbols(Dictionary.load(file).symbols)
    return found


def _norms(stack: Stack) -> str:
    return ("pre-norm" if stack.pre_norm else "post-norm") if has_norms(stack) else "no norms"


def _fitting(kind: str, new: Stack) -> str:
    """Return the flags with which *new* would have norms of *kind*; its encoder is checked first."""
    names = {"post-norm": "postnorm", "pre-norm": "prenorm"}
    if new.aggregator.name == "dlcl":
        names = {"post-norm": "dlcl_postnorm", "pre-norm": "dlcl"}
    if kind not in names:
        return "use the --deep-init of its training"
    if new.side == "decoder" and kind == "pre-norm":
        return "add --decoder-normalize-before"
    arch = f"transformer_{names[kind]}_{new.layers}l"
    arch = arch if new.side == "encoder" and arch in ARCH_CONFIG_REGISTRY else f"transformer_{names[kind]}_12l"
    both = " --encoder-normalize-before" if new.side == "decoder" else ""
    return f"use an architecture transformer_{names[kind]}_*, such as --arch {arch}{both}"


def _check_stack(source: Source, old: Stack, new: Stack) -> None:
    """Refuse a stack that cannot take the layers of another."""
    side = new.side
    if old.layers == 0:
        raise source.refuse(f"its {side} has no layers to take")
    if old.layers > new.layers:
        raise source.refuse(
            f"its {side} has {old.layers} layers, the new one {new.layers}: use --{side}-layers {old.layers} or more"
        )
    kinds = [_norms(stack) for stack in (old, new)]
    if kinds[0] != kinds[1]:
        raise source.refuse(f"its {side} has {kinds[0]}, the new one {kinds[1]}: {_fitting(kinds[0], new)}")
    if old.layout.split != new.layout.split:
        raise source.refuse(
            f"the layers of --layer-agg {old.aggregator.name} ({side}) are not those of {new.aggregator.name}: "
            "use an aggregator that splits no layers, or both the same"
        )
    numbers = [("dim", f"{side}-embed-dim"), ("heads", f"{side}-attention-heads")]
    if old.layout.feed_forward and new.layout.feed_forward:
        numbers += [("ffn_dim", f"{side}-ffn-embed-dim"), ("activation", "activation-fn")]
    for name, flag in numbers:
        there, here = getattr(old, name), getattr(new, name)
        if there != here:
            raise source.refuse(f"it has --{flag} {there}, the new model {here}: use --{flag} {there}")


def _check_words(source: Source, task: Any, allow_other: bool) -> str:
    """Refuse another vocabulary; return what is to be told of dictionaries that could not be compared."""
    own, missing = sums(task), []
    for side, name in LANGUAGES.items():
        entries = len(source.weights[f"{side}.embed_tokens.weight"])
        here = len(getattr(task, f"{name}_dictionary"))
        if entries != here:
            raise source.refuse(f"its vocabulary has {entries} entries ({name}), that of the data {here}: {BINARISE}")
        if name not in source.dictionaries:
            missing.append(name)
        elif source.dictionaries[name] != own[name] and not allow_other:
            raise source.refuse(
                f"it was trained with another {name} dictionary ({source.dictionaries[name]}) than that of the data "
                f"({own[name]}): {BINARISE}; --allow-other-dictionary takes it as it is"
            )
    return f"; its dictionaries ({' and '.join(missing)}) are not there to compare" if missing else ""


def _choose(
    source: Source, own: dict[str, Tensor], stacks: dict[str, Stack], layers: dict[str, list[int]]
) -> dict[str, str]:
    """Names of parameters of the new model, and of what they take."""
    chosen = {}
    for name in own:
        found, other = _LAYER.fullmatch(name), name
        if found:
            side, module = found[1], int(found[2])
            layer, part = divmod(module, stacks[side].modules_per_layer)
            module = layers[side][layer] * source.stacks[side].modules_per_layer + part
            other = f"{side}.layers.{module}.{found[3]}"
        if other in source.weights:
            chosen[name] = other
    for name in _incomplete(source, own, stacks):
        chosen.pop(name, None)
    for name, other in chosen.items():
        there, here = tuple(source.weights[other].shape), tuple(own[name].shape)
        if there != here:
            raise source.refuse(f"its {other} is {there}, that of the new model {here}: use the flags of its training")
    return chosen


def _incomplete(source: Source, own: dict[str, Tensor], stacks: dict[str, Stack]) -> list[str]:
    """The parameters of aggregators and memories that are not the checkpoint's: another method, or another depth."""
    old = source.stacks
    same = {f"{side}.history.": old[side].aggregator.name == stacks[side].aggregator.name for side in SIDES}
    same["encoder.memory."] = old["decoder"].memory.name == stacks["decoder"].memory.name
    found = []
    for prefix, alike in same.items():
        here, there = (
            {name: value.shape for name, value in weights.items() if name.startswith(prefix)}
            for weights in (own, source.weights)
        )
        if not alike or here != there:
            found += here
    return found


def _check_shared(source: Source, own: dict[str, Tensor], taken: dict[str, str]) -> None:
    """Refuse tables of embeddings that the new model has as one, and the checkpoint with different values."""
    first: dict[int, str] = {}
    for name, other in taken.items():
        same = first.setdefault(own[name].data_ptr(), other)
        if same != other and not torch.equal(source.weights[same], source.weights[other]):
            raise source.refuse(f"its {same} and {other} differ, and the new model shares them: leave out --share-...")


def _tell(
    source: Source, own: dict[str, Tensor], taken: dict[str, str], layers: dict[str, list[int]], checked: str
) -> None:
    """Log what was taken, and what was not."""
    said = [f"{side} layers {_runs([number + 1 for number in layers[side]])}" for side in SIDES]
    kept = _groups(name for name in own if name not in taken)
    left = {name for name in source.weights if name.rsplit(".", 1)[-1] not in _NO_WEIGHTS} - {*taken.values()}
    logger.info(
        f"--init-from {source.path} ({source.arch}): {', '.join(said)}; {len(taken)} of {len(own)} tensors taken; "
        f"with their own initialisation: {kept}; not taken: {_groups(left)}{checked}"
    )


def _runs(numbers: list[int]) -> str:
    """Numbers as runs: 1-6 5-6."""
    starts = [index for index, number in enumerate(numbers) if not index or number != numbers[index - 1] + 1]
    runs = [numbers[start:end] for start, end in zip(starts, [*starts[1:], len(numbers)])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _groups(names: Iterable[str]) -> str:
    """Names of parameters without the numbers of layers, each once."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})) or "none"
