"""Stored models, and the :class:`Transformer` built from a stored model and two dictionaries.

Packages do not require fairseq. Other files need a registered reader; the plugin registers one for checkpoints.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairseq_deep.core.checkpoints import check_loadable, upgrade
from fairseq_deep.core.checks import check_sizes
from fairseq_deep.core.description import describe
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from .dictionary import Dictionary


@dataclass
class StoredModel:
    """The content of a file with a trained model.

    Attributes:
        flags: all flags of the model
        tensors: its weights by their names in :class:`Transformer`, or by older names
        task: settings of the translation task, such as "source_lang" and "left_pad_source"
        hashes: hashes of the training dictionaries, by side; None: unknown
        label_smoothing: label smoothing of the training loss
        stock_arch: fairseq's name of the architecture, for a checkpoint of one of its own; the flags name our twin
    """

    flags: Namespace
    tensors: dict[str, Tensor]
    task: dict[str, Any]
    hashes: dict[str, str] | None = None
    label_smoothing: float = 0.0
    stock_arch: str | None = None


READERS: dict[str, Callable[[str], StoredModel]] = {}
"""Readers by file name suffix; "" reads all other files."""


def read_stored(path: str) -> StoredModel:
    """Read the model in the file at *path*.

    Raises:
        UsageError: no reader supports this file, or the file is invalid
    """
    read = READERS.get(os.path.splitext(path)[1]) or READERS.get("")
    if read is None:
        raise UsageError(
            f"{path}: a checkpoint requires fairseq; install it (docs/install.md), or convert the checkpoint with "
            "'fairseq-deep package' on a machine with fairseq"
        )
    return read(path)


def build_model(stored: StoredModel, source: Dictionary, target: Dictionary) -> Transformer:
    """Build a model from *stored*; its weights are renamed to current names in place.

    Raises:
        UsageError: settings, weights and dictionaries do not fit together
    """
    return load_weights(untrained(stored.flags, source, target), stored.tensors)


def load_weights(model: Transformer, tensors: dict[str, Tensor]) -> Transformer:
    """Load *tensors* into *model* and return it in evaluation mode; *tensors* are renamed to current names in place.

    Raises:
        UsageError: names or shapes differ
    """
    upgrade(model, tensors)
    check_loadable(model, tensors)
    model.load_state_dict(tensors)
    return model.eval()


def untrained(flags: Namespace, source: Dictionary, target: Dictionary) -> Transformer:
    """Build an untrained model.

    Raises:
        UsageError: the settings conflict with each other or with the dictionaries
    """
    check_sizes(flags, Namespace(source_dictionary=source, target_dictionary=target))
    stacks = describe(flags)
    for flag in ("adaptive_softmax_cutoff", "quant_noise_pq"):
        if getattr(flags, flag, None):
            raise UsageError(f"--{flag.replace('_', '-')} requires fairseq; translate with fairseq-generate")
    shared = getattr(flags, "share_all_embeddings", False)
    return Transformer.build(stacks, len(source), None if shared else len(target), Dictionary.pad)
