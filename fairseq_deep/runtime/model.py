"""A trained model as a file has it, and the :class:`Transformer` that it makes with two dictionaries.

Packages need no fairseq. Other files have readers, which register themselves: the plugin reads checkpoints.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairseq_deep.core.checkpoints import check_loadable, upgrade
from fairseq_deep.core.checks import check_flags, check_sizes
from fairseq_deep.core.description import describe
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from .dictionary import Dictionary


@dataclass
class StoredModel:
    """A trained model as it is stored.

    Attributes:
        flags: the model's, all of them
        tensors: its weights by their names in :class:`Transformer`, or by older ones
        task: settings of the translation task, such as "source_lang" and "left_pad_source"
        hashes: of the dictionaries that it was trained with, by side; None: unknown
        label_smoothing: of the training loss
    """

    flags: Namespace
    tensors: dict[str, Tensor]
    task: dict[str, Any]
    hashes: dict[str, str] | None = None
    label_smoothing: float = 0.0


READERS: dict[str, Callable[[str], StoredModel]] = {}
"""Readers by the ends of names; "" reads all other files."""


def read_stored(path: str) -> StoredModel:
    """The model in the file at *path*.

    Raises:
        UsageError: nothing reads this file, or its reader rejects it
    """
    read = READERS.get(os.path.splitext(path)[1]) or READERS.get("")
    if read is None:
        raise UsageError(
            f"{path}: a checkpoint requires fairseq; install it (docs/install.md), or convert the checkpoint with "
            "'fairseq-deep package' where fairseq is installed"
        )
    return read(path)


def build_model(stored: StoredModel, source: Dictionary, target: Dictionary) -> Transformer:
    """A model with the settings and weights of *stored*, whose weights get today's names in place.

    Raises:
        UsageError: settings, weights and dictionaries do not belong together
    """
    return load_weights(untrained(stored.flags, source, target), stored.tensors)


def load_weights(model: Transformer, tensors: dict[str, Tensor]) -> Transformer:
    """*model* in evaluation mode with the weights *tensors*, which get today's names in place.

    Raises:
        UsageError: names or shapes differ
    """
    upgrade(model, tensors)
    check_loadable(model, tensors)
    model.load_state_dict(tensors)
    return model.eval()


def untrained(flags: Namespace, source: Dictionary, target: Dictionary) -> Transformer:
    """An untrained model.

    Raises:
        UsageError: the settings contradict each other or the dictionaries
    """
    check_sizes(flags, Namespace(source_dictionary=source, target_dictionary=target))
    stacks = describe(flags)
    check_flags(flags, stacks)
    for flag in ("adaptive_softmax_cutoff", "quant_noise_pq"):
        if getattr(flags, flag, None):
            raise UsageError(f"--{flag.replace('_', '-')} requires fairseq; translate with fairseq-generate")
    shared = getattr(flags, "share_all_embeddings", False)
    return Transformer.build(stacks, len(source), None if shared else len(target), Dictionary.pad)
