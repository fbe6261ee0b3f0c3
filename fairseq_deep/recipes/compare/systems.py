"""The systems of a comparison: parsing of the user's input, and checks of architectures and flags."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairseq_deep.core.registry import nearest
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.record import read_json, write_json
from fairseq_deep.tools.input_text import iterate_lines

RECORD = "system.json"
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}")
OWN = {"--lr", "--lr-scheduler", "--optimizer", "--clip-norm", "--on-divergence", "--decoder-input-dim",
       "--min-loss-scale", "--rdrop-alpha", "--fp16-init-scale", "--fp16-scale-window", "--fp16-scale-tolerance",
       "--ddp-backend", "--find-unused-parameters", "--num-workers", "--data-buffer-size", "--empty-cache-freq",
       "--tensorboard-logdir", "--wandb-project"}  # fmt: skip
"""Flags that may differ between systems, in addition to those of the model, the optimizer and the scheduler; flags from
--fp16-init-scale on do not change the trained model."""
SHARED = {"--share-all-embeddings", "--share-decoder-input-output-embed", "--max-source-positions",
          "--max-target-positions"}  # fmt: skip
"""Flags of models that change the data or the shared embeddings."""


@dataclass
class System:
    """One row of the table.

    Attributes:
        label: name in the table and of its directory
        arch: name of the architecture
        flags: flags of fairseq-train from the user
        sizes: flags for the common width, set by ``check``
        ours: whether the architecture is one of this package
        line, depth: with ``--depths``, the user's label and the number of encoder layers
        tuned: with ``--tune lr``, validation loss by learning rate
    """

    label: str
    arch: str
    flags: list[str]
    sizes: Sequence[str] = ()
    ours: bool = True
    line: str = ""
    depth: int | None = None
    tuned: dict[float, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The system as a user writes it."""
        return " ".join([self.arch, *map(shlex.quote, self.flags)])

    def record(self, folder: str) -> None:
        """Record the system in the directory of its runs, unless an earlier command has done so."""
        path = os.path.join(folder, RECORD)
        if not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            write_json(path, {"system": self.text})


def read_systems(words: list[str], path: str) -> list[System]:
    """Parse the systems of the command line and of the file *path*, in order."""
    lines = list(words)
    if path:
        texts = (line.strip() for line in iterate_lines(path))
        lines += [text for text in texts if text and not text.startswith("#")]
    if not lines:
        raise UsageError("no system to train: give architectures, as in: run.sh --data DIR prenorm_6l dlcl_6l")
    known = _known_architectures()
    systems = [_parse(line, known) for line in lines]
    for index, system in enumerate(systems):
        if system.label in [other.label for other in systems[:index]]:
            raise UsageError(f"{system.label} is given twice: rename one of them, as in 'LABEL={system.text}'")
    return systems


def _known_architectures() -> dict[str, Any]:
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_deep  # noqa: F401  # registers our architectures

    return ARCH_MODEL_REGISTRY


def _parse(line: str, known: dict[str, Any]) -> System:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"'{line}': {error}") from error
    label, equals, name = words[0].partition("=") if words else ("", "", "")
    if not equals:
        label, name = "", label
    arch = next((full for full in (name, f"transformer_{name}") if full in known), None)
    if arch is None:
        full = name if name.startswith("transformer") else f"transformer_{name}"
        near = nearest(full, known) or nearest(name, known)
        raise UsageError(f"unknown architecture '{name}'{near}: see fairseq-deep archs")
    short = arch[len("transformer_") :] if arch.startswith("transformer_") else arch
    if not equals:
        label = re.sub(r"[^A-Za-z0-9._+-]+", "_", "_".join([short, *(word.lstrip("-") for word in words[1:])]))
    if not LABEL.fullmatch(label):
        raise UsageError(f"'{label}' cannot name a system: use up to 60 letters, digits and . _ + -, as in 'X={arch}'")
    if len(words) > 1 and not words[1].startswith("-"):
        raise UsageError(f"'{line}': '{words[1]}' is not a flag; put each system in separate quotes")
    return System(label, arch, words[1:])


def check(systems: list[System], parse: Callable[[System], argparse.Namespace], width: int) -> None:
    """Parse the flags of all systems like fairseq-train, and build each model without memory.

    Args:
        systems: the systems; their ``ours`` and ``sizes`` are set
        parse: returns the flags of a system's training command
        width: common width, or 0 for each architecture's own

    Raises:
        UsageError: with the first problem and the name of the system
    """
    import fairseq_deep

    package = set(fairseq_deep.list_archs())
    for system in systems:
        system.ours = system.arch in package
        try:
            _check_one(system, parse, width)
        except (UsageError, SystemExit) as error:  # fairseq's parser exits
            raise UsageError(f"{system.label}: {error}") from error


def _check_one(system: System, parse: Callable[[System], argparse.Namespace], width: int) -> None:
    """Check a system, and set its ``sizes``."""
    # models reject a feed-forward width for stacks without feed-forward sub-layers
    for sides in (("encoder", "decoder"), ("encoder",), ("decoder",), ()) if width else ((),):
        sizes = [word for side in sides for word in (f"--{side}-ffn-embed-dim", str(4 * width))]
        try:
            with_own = parse(replace(system, sizes=sizes))
            _build(system, with_own)
        except (UsageError, SystemExit):
            if not sides:
                raise
            continue
        _check_shared(with_own, system.flags)
        system.sizes = sizes
        return


def _actions(*owners: Any) -> list[argparse.Action]:
    """Return the arguments of models, optimizers and schedulers."""
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for owner in owners:
        owner.add_args(parser)
    return parser._actions


def _check_shared(args: argparse.Namespace, flags: list[str]) -> None:
    """Reject flags of neither model, optimizer nor scheduler, which must be the same for all systems."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.registry import REGISTRIES

    chosen = [(kind, getattr(args, kind)) for kind in ("optimizer", "lr_scheduler")]
    owners = [REGISTRIES[kind]["registry"][name] for kind, name in chosen if name]
    actions = _actions(ARCH_MODEL_REGISTRY[args.arch], *owners)
    free = {flag for action in actions for flag in action.option_strings} | OWN
    for word in flags:
        flag = word.partition("=")[0]
        if re.match("-+[a-z]", flag) and flag not in free - SHARED:
            raise UsageError(f"{flag} must be the same for all systems: omit it in this one")


def _build(system: System, args: argparse.Namespace) -> None:
    """Build a model of this package without memory; fairseq's own models are not checked."""
    if not system.ours:
        return
    from fairseq.data import Dictionary

    from fairseq_deep.core.compat import skip_initialisation
    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

    symbols = Dictionary()
    task = types.SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    with skip_initialisation():
        DeepTransformerModel.build_model(argparse.Namespace(**vars(args)), task)


def check_unchanged(systems: list[System], folder: str) -> None:
    """Reject a label of another system in *folder*."""
    for system in systems:
        old = read_json(os.path.join(folder, system.label, RECORD)).get("system", system.text)
        if old != system.text:
            raise UsageError(
                f"{system.label} was '{old}' in {folder}, now it is '{system.text}': give it another name"
                f" ('LABEL={system.text}'), or use another --exp"
            )
