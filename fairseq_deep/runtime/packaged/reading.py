"""Reading of packaged models.

No code from the directory is executed, and no other files are read. Checksums, settings, names, shapes and types of all
tensors are checked before they are used.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.checkpoints import state_differences, upgrade_layers
from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.errors import UsageError, one_line
from fairseq_deep.runtime.dictionary import Dictionary, hash_symbols
from fairseq_deep.runtime.model import READERS, StoredModel, untrained
from fairseq_deep.runtime.text import Merges

from .config import read_config
from .folder import CARD, CODES, CONFIG, WEIGHTS, Folder, dictionary_name, folder_of

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
"""Names of tensor types in the format and in torch; fairseq's version markers have type I64."""
LARGEST_HEADER = 1 << 23
"""Maximum size of a header, in bytes; 1,000 layers need about 4 million."""


@dataclass(frozen=True)
class Package:
    """The content of a package.

    Attributes:
        config: the content of ``config.json``
        tensors: weights by name; tied names have one tensor
        source, target: dictionaries
        paths: paths of the configuration, the card and the :func:`text_files` by name
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: Dictionary
    target: Dictionary
    paths: dict[str, str]

    @property
    def flags(self) -> Namespace:
        """The flags of the model."""
        return Namespace(arch=self.config["arch"], **self.config["model"])

    @property
    def stored(self) -> StoredModel:
        """The model in the form that all readers return."""
        hashes = {"source": hash_symbols(self.source.symbols), "target": hash_symbols(self.target.symbols)}
        smoothing = self.config["criterion"]["label_smoothing"]
        return StoredModel(self.flags, self.tensors, self.config["task"], hashes, smoothing)


def load(path: str, weights: bool = True, cached: bool = False) -> Package:
    """Read the package *path*, a directory or the weights in it.

    Args:
        weights: whether to read the weights; a package without them has no tensors
        cached: see :class:`Folder`

    Raises:
        UsageError: the package is corrupt, or has invalid content
    """
    if path.endswith(".safetensors") and os.path.basename(path) != WEIGHTS:
        raise UsageError(f"{path}: not a packaged model; its weights must be called {WEIGHTS}")
    folder = Folder(folder_of(path), cached)
    config = read_config(folder)
    names = text_files(config)
    folder.refuse_others(names)
    paths = {name: folder.verified(name) for name in (CONFIG, *names)}
    if os.path.exists(os.path.join(folder.path, CARD)):
        paths[CARD] = folder.place(CARD)
    if config["text"]["sub_words"] == "subword-nmt":
        Merges(paths[names[2]])  # the library would exit the program
    dictionaries = [Dictionary.load(paths[name]) for name in names[:2]]
    if not weights:
        return Package(config, {}, *dictionaries, paths)
    package = Package(config, _read_weights(folder, config), *dictionaries, paths)
    check_fit(folder.path, package)
    return package


READERS[".safetensors"] = lambda path: load(path).stored


def text_files(config: dict[str, Any]) -> list[str]:
    """Return the names of the files for text processing: two dictionaries and, if used, sub-words."""
    names = [dictionary_name(config["task"][f"{side}_lang"]) for side in ("source", "target")]
    return names + [name for name in (codes_of(config),) if name]


def codes_of(config: dict[str, Any]) -> str | None:
    """Return the name of the file with the sub-words; None without sub-words."""
    return CODES.get(config["text"]["sub_words"])


def _read_weights(folder: Folder, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return all weights by name."""
    path = folder.verified(WEIGHTS)
    tensors = read_tensors(path, _most_tensors(config["model"]))
    for name, owner in config["tied"].items():
        if name in tensors or owner not in tensors:
            raise UsageError(f"{os.path.join(folder.path, CONFIG)}: rejected: {name} cannot be tied to {owner}")
    tensors.update({name: tensors[owner] for name, owner in config["tied"].items()})
    upgrade_layers(tensors)  # older packages of fairseq's models have unused copies
    return tensors


def _most_tensors(flags: dict[str, Any]) -> int:
    """Return a number of tensors that no model with these *flags* exceeds; reading a tensor takes 0.1 ms."""
    return 200 * (2 + sum(flags.get(f"{side}_layers") or 6 for side in ("encoder", "decoder")))


def read_tensors(path: str, most: int) -> dict[str, Tensor]:
    """Read at most *most* tensors, each into its own memory.

    Raises:
        UsageError: the file is corrupt, has too many tensors or too much metadata, or tensors of an unsupported type
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = OrderedDict()
    with open(path, "rb") as stream:
        size, largest = int.from_bytes(stream.read(8), "little"), min(LARGEST_HEADER, 300 * most)
    if largest < size <= os.path.getsize(path):
        raise UsageError(f"{path}: rejected: its header has {size:,} bytes, more than {largest:,}")
    try:
        with safe_open(path, framework="pt") as opened:
            names = opened.keys()
            if len(names) > most:
                raise UsageError(f"{path}: rejected: it has {len(names):,} tensors, more than {most:,} for its depth")
            for name in names:
                kind = opened.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise UsageError(f"{path}: rejected: {name[:60]!r} has the unsupported type {kind}")
                tensors[name] = opened.get_tensor(name).clone()
                if not torch.isfinite(tensors[name]).all():
                    raise UsageError(f"{path}: rejected: {name[:60]!r} holds NaN or Inf")
    except UsageError:
        raise
    except Exception as error:  # the library's exceptions for a corrupt file have no common type
        reason = one_line(error, 200)
        raise UsageError(f"{path}: truncated or invalid safetensors file ({reason}); copy it again") from error
    return tensors


def check_fit(folder: str, package: Package) -> None:
    """Reject settings, tensors and dictionaries that do not fit together, by building a model without memory.

    Raises:
        UsageError: with the first difference
    """
    path, flags = os.path.join(folder, CONFIG), package.flags
    for side in ("encoder", "decoder"):
        if (getattr(flags, f"{side}_layers", None) or 0) > len(package.tensors):
            raise UsageError(f"{path}: rejected: {WEIGHTS} does not have that many {side}_layers")
    try:
        with skip_initialisation():
            model = untrained(flags, package.source, package.target)
            differences = state_differences(model.state_dict(), package.tensors)
    except Exception as error:  # invalid settings raise arbitrary exceptions in torch
        reason = one_line(error, 200)
        raise UsageError(f"{path}: rejected: cannot build a model with its settings ({reason})") from error
    if differences:
        where = f"{os.path.join(folder, WEIGHTS)}: does not fit {CONFIG} and the dictionaries"
        raise UsageError(f"{where} ({differences[0]}; {len(differences)} differences)")
