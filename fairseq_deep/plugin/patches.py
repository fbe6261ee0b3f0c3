"""Every change that this package makes to fairseq at run time; ``fairseq-deep doctor`` prints the table.

Importing the plugin applies all of them once (:func:`apply`). The edits of the source, which ``third_party/fairseq``
makes when it builds fairseq, are listed there.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
from typing import Any, NamedTuple

from fairseq.models.transformer import TransformerModel

from fairseq_deep.core.registry import UsageError

from .training.by_type import DistributedDataParallelByType, total_norm
from .training.fp16 import FP16Optimizer
from .training.readers import stop_readers
from .training.restart import load_checkpoint


class Patch(NamedTuple):
    """A replaced name.

    Attributes:
        where: the module, or the class in it, that has the name
        name: what is replaced
        replacement: by what
        reason: why
        until: the fairseq that does not need it; "none yet" where no release has the change
    """

    where: str
    name: str
    replacement: Any
    reason: str
    until: str = "none yet"

    def apply(self) -> None:
        """Put the replacement in its place."""
        module, _, attribute = self.where.partition(":")
        owner = importlib.import_module(module)
        setattr(getattr(owner, attribute) if attribute else owner, self.name, self.replacement)


class _NeedsTwin(argparse.Action):
    """A flag of this package, given with an architecture of stock fairseq."""

    def __call__(self, parser, namespace, values, option_string=None):
        arch = getattr(namespace, "arch", None) or "transformer"
        raise UsageError(f"{option_string} requires an architecture of this package: use --arch deep_{arch}, the same "
                         "model with our flags")  # fmt: skip


_stock_add_args = TransformerModel.__dict__["add_args"].__func__


@classmethod
def _add_args(cls, parser) -> None:
    """Add fairseq's flags, and for its own Transformer our flags as an error that names the architecture.

    fairseq's command line passes a group of its parser. Programs that list the flags pass a parser, and get fairseq's.
    """
    _stock_add_args(cls, parser)
    if cls is TransformerModel and isinstance(parser, argparse._ArgumentGroup):
        from .models.deep_transformer import add_own_args

        own = argparse.ArgumentParser(add_help=False)
        add_own_args(own)
        for action in own._actions:
            unknown = [option for option in action.option_strings if option not in parser._option_string_actions]
            if unknown:
                parser.add_argument(*unknown, action=_NeedsTwin, nargs="?", default=argparse.SUPPRESS,
                                    help=argparse.SUPPRESS)


PATCHES = (
    Patch("fairseq.models.distributed_fairseq_model", "LegacyDistributedDataParallel", DistributedDataParallelByType,
          "legacy_ddp reduces gradients of fp32 weights in the type of the first weight"),
    Patch("fairseq.utils", "multi_tensor_total_norm", total_norm,
          "apex's norm reads all gradients in the type of the first"),
    Patch("fairseq.optim", "FP16Optimizer", FP16Optimizer,
          "it copies and zeroes tensors one by one; with fused_adam and muon in one launch. muon's are not flattened"),
    Patch("fairseq.models.transformer:TransformerModel", "add_args", _add_args,
          "our flags with an architecture of fairseq end in a line that names its deep_ twin"),
    Patch("fairseq.trainer:Trainer", "load_checkpoint", load_checkpoint,
          "a new training with --stack-restart-updates begins in the middle of its schedule"),
)  # fmt: skip
EXIT_HOOK = "fairseq's threads that read ahead are ended at exit, or the process aborts after all was saved"
"""What ``atexit`` runs besides."""


def apply() -> None:
    """Apply all patches, and register the exit hook."""
    for patch in PATCHES:
        patch.apply()
    atexit.register(stop_readers)
