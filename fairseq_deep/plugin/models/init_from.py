"""``--init-from``: initialises a new model with the weights of a trained model of equal or smaller depth.

A deeper stack repeats the layers of the trained one, in blocks or interleaved (``--init-from-order``). Blocks are
copies of the whole stack, followed by its top layers:

    6 layers -> 12    1 2 3 4 5 6  1 2 3 4 5 6                              interleaved: 1 1 2 2 3 3 4 4 5 5 6 6
             ->  8    1 2 3 4 5 6  5 6                                                   1 1 2 3 4 4 5 6
             -> 20    1 2 3 4 5 6  1 2 3 4 5 6  1 2 3 4 5 6  5 6

The first is the stacking of Gong et al. (2019). The first two are the shallow-to-deep training of Li et al. (2020),
which appends the top layers of a trained encoder once more. The bottom layers keep their positions, and the top layer
is still the one that the final norm and the other stack were trained with. If a branch has the factor 1/L, doubling L
halves the factor. Interleaved layers then compute x + F/2 + F/2 for x + F, nearly the same function.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_deep.core.checkpoints import find_separate, upgrade
from fairseq_deep.core.description import SIDES, describe
from fairseq_deep.core.layers.layer import has_norms
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from fairseq_deep.errors import one_line
from fairseq_deep.plugin.compat import load_checkpoint, model_flags

from .dictionaries import KEY, hash_symbols, sums
from .hydra import fill

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_NO_WEIGHTS = ("version", "_float_tensor")
ORDERS = ("block", "interleave")
LANGUAGES = dict(zip(SIDES, ("source", "target")))
BINARISE = "binarise with its own (fairseq-preprocess --srcdict, --tgtdict)"


def repeated_layers(old: int, new: int, order: str = "block") -> list[int]:
    """Return the index of the old layer that each new layer copies; *new* is at least *old*, indices start at 0."""
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
        weights: its parameters by their current names
        stacks: descriptions of its stacks, by side
        dictionaries: hashes of "source" and "target" as in :func:`sums`, if known
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
    """Copy matching parameters of the checkpoint at *path* into *model*, described by *stacks*.

    Args:
        allow_other: accept a checkpoint of other dictionaries of equal sizes
        order: order of repeated layers, one of `ORDERS`

    Raises:
        UsageError: the checkpoint has other shapes or another vocabulary, or is deeper
    """
    source = _read(path, model, task)
    if model.waiting:
        raise source.refuse("--admin-start profile requires an untrained model: use another --admin-start")
    for side in SIDES:
        _check_stack(source, source.stacks[side], stacks[side])
    checked = _check_words(source, task, allow_other)
    own = {name: value for name, value in model.state_dict().items() if name.rsplit(".", 1)[-1] not in _NO_WEIGHTS}
    layers = {side: repeated_layers(source.stacks[side].layers, stacks[side].layers, order) for side in SIDES}
    for side in SIDES:
        _check_placements(source, stacks[side], layers[side])
    taken = _choose(source, own, stacks, layers)
    _check_shared(source, own, taken)
    for name, value in taken.items():
        own[name].copy_(source.weights[value])
    _tell(source, own, taken, layers, checked)


def _read(path: str, model: nn.Module, task: Any) -> Source:
    """Read the checkpoint at *path*."""
    try:
        state = load_checkpoint(path)
    except Exception as error:  # a corrupt or rejected file raises any exception
        raise UsageError(f"--init-from {path}: cannot load it ({one_line(error)})") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UsageError(f"--init-from {path}: not a fairseq checkpoint (no 'model'); use a file of fairseq-train")
    given, weights = model_flags(state), dict(state["model"])
    try:
        stacks = describe(fill(given, path, "use another model"))
    except Exception as error:  # invalid settings raise arbitrary exceptions in fairseq
        reason = one_line(error)
        raise UsageError(f"--init-from {path}: cannot build a model with its settings ({reason})") from error
    upgrade(model, weights)
    arch = given.get("arch") or given.get("_name")
    return Source(path, arch, weights, stacks, _find_dictionaries(path, state, task))


def _find_dictionaries(path: str, state: dict[str, Any], task: Any) -> dict[str, str]:
    """Return the hashes of a checkpoint's dictionaries, from the checkpoint or from files next to it."""
    found = dict((state.get("task_state") or {}).get(KEY) or {})
    old = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    old = dict(old if hasattr(old, "keys") else vars(old))
    for name in LANGUAGES.values():
        language = old.get(f"{name}_lang") or getattr(getattr(task, "cfg", None), f"{name}_lang", None)
        file = os.path.join(os.path.dirname(path), f"dict.{language}.txt")
        if name not in found and os.path.isfile(file):
            with contextlib.suppress(Exception):  # not a dictionary
                found[name] = hash_symbols(Dictionary.load(file).symbols)
    return found


def _norms(stack: Stack) -> str:
    return ("pre-norm" if stack.pre_norm else "post-norm") if has_norms(stack) else "no norms"


def _check_stack(source: Source, old: Stack, new: Stack) -> None:
    """Reject a stack that cannot copy the layers of another."""
    side = new.side
    if old.layers == 0:
        raise source.refuse(f"its {side} has no layers to copy")
    if old.layers > new.layers:
        raise source.refuse(
            f"its {side} has {old.layers} layers, the new one {new.layers}: use --{side}-layers {old.layers} or more"
        )
    there, here = _norms(old), _norms(new)
    if there != here:
        fixes = {"pre-norm": f"add --{side}-normalize-before",
                 "no norms": "use the --deep-init and --layer-agg of its training"}  # fmt: skip
        fix = fixes.get(there, "use an architecture transformer_*postnorm_*")
        raise source.refuse(f"its {side} has {there}, the new one {here}: {fix}")
    if old.layout.split != new.layout.split:
        raise source.refuse(
            f"the layers of --layer-agg {old.aggregator.name} ({side}) are split differently from the layers of "
            f"{new.aggregator.name}: use an aggregator that splits no layers, or the same one"
        )
    same = side == "encoder" or old.layout.attn_residual == new.layout.attn_residual
    if old.aggregator.method is new.aggregator.method and not same:
        flag = "--lstm-attn-residual" if old.layout.attn_residual else "--lstm-no-attn-residual"
        raise source.refuse(f"its {side} has another query of the cross-attention: add {flag}")
    names = ["dim", "heads", "scale_embedding", "positions"]
    if old.layout.feed_forward and new.layout.feed_forward:
        names += ["ffn", "ffn_dim", "activation"]
    for name in names:
        (flag, there), (_, here) = old.given(name), new.given(name)
        if there != here:
            is_flag = flag.startswith("--") and not isinstance(there, bool)
            fix = f"use {flag} {there}" if is_flag else "use the flags of its training run"
            raise source.refuse(f"its {side} has {flag} {there}, the new one {here}: {fix}")


def _check_placements(source: Source, new: Stack, layers: list[int]) -> None:
    """Reject a layer with another norm placement than the layer that it copies; Mix-LN has both kinds."""
    old = source.stacks[new.side]
    with torch.random.fork_rng([]):  # learned connections draw their initial values
        there, here = (
            [stack.residual.build(stack, number + 1).pre_norm for number in range(stack.layers)] for stack in (old, new)
        )
    for number, (pre_norm, layer) in enumerate(zip(here, layers), start=1):
        if pre_norm != there[layer]:
            kinds = [("post-norm", "pre-norm")[kind] for kind in (there[layer], pre_norm)]
            raise source.refuse(
                f"layer {layer + 1} of its {new.side} has {kinds[0]}, its copy in layer {number} {kinds[1]}: use the "
                "same --residual, and for Mix-LN --init-from-order interleave or other --mix-ln-layers"
            )


def _check_words(source: Source, task: Any, allow_other: bool) -> str:
    """Reject another vocabulary; return a note for the log on dictionaries that could not be compared."""
    own, missing = sums(task), []
    for side, name in LANGUAGES.items():
        entries = len(source.weights[f"{side}.embed_tokens.weight"])
        here = len(getattr(task, f"{name}_dictionary"))
        if entries != here:
            raise source.refuse(f"its vocabulary has {entries} entries ({name}), the data's {here}: {BINARISE}")
        if name not in source.dictionaries:
            missing.append(name)
        elif source.dictionaries[name] != own[name] and not allow_other:
            raise source.refuse(
                f"it was trained with another {name} dictionary ({source.dictionaries[name]}) than the data's "
                f"({own[name]}): {BINARISE}; --allow-other-dictionary accepts it"
            )
    return f"; its dictionaries ({' and '.join(missing)}) are missing, so not compared" if missing else ""


def _choose(
    source: Source, own: dict[str, Tensor], stacks: dict[str, Stack], layers: dict[str, list[int]]
) -> dict[str, str]:
    """Return {name of a parameter of the new model: name of the checkpoint's parameter that it copies}."""
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
            raise source.refuse(f"its {other} is {there}, the new model's {here}: use the flags of its training run")
    return chosen


def _incomplete(source: Source, own: dict[str, Tensor], stacks: dict[str, Stack]) -> list[str]:
    """Return the parameters of aggregators and memories that differ from the checkpoint's in method or depth."""
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
    """Reject embedding tables that the new model shares and the checkpoint has with different values."""
    separate = find_separate(own, {name: source.weights[other] for name, other in taken.items()})
    if separate:
        names = " and ".join(taken[name] for name in separate)
        raise source.refuse(f"its {names} differ, and the new model shares them: omit --share-...")


def _tell(
    source: Source, own: dict[str, Tensor], taken: dict[str, str], layers: dict[str, list[int]], checked: str
) -> None:
    """Log the copied layers and tensors, and the rest."""
    said = [f"{side} layers {' '.join(str(number + 1) for number in layers[side])}" for side in SIDES]
    kept = _groups(name for name in own if name not in taken)
    left = {name for name in source.weights if name.rsplit(".", 1)[-1] not in _NO_WEIGHTS} - {*taken.values()}
    logger.info(
        f"--init-from {source.path} ({source.arch}): {', '.join(said)}; {len(taken)} of {len(own)} tensors copied; "
        f"with their own initialisation: {kept}; not copied: {_groups(left)}{checked}"
    )


def _groups(names: Iterable[str]) -> str:
    """Format distinct names of parameters, without layer numbers."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})) or "none"
