"""Reading of packaged models.

No code from the directory is executed, and no other files are read. Checksums, settings, names, shapes and types of all
tensors are checked before they are used.
"""

from __future__ import annotations

import itertools
import os
import re
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
from fairseq_deep.runtime.records import parse

from .config import read_config
from .folder import (
    CODES,
    CONFIG,
    WEIGHTS,
    PackageError,
    dictionary_name,
    folder_of,
    place,
    refuse_others,
    verify_checksums,
)

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
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: Dictionary
    target: Dictionary

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


def load(path: str) -> Package:
    """Read the package with the weights at *path*.

    Raises:
        PackageError: the package is corrupt, or has invalid content
    """
    folder = folder_of(path)
    if os.path.basename(path) != WEIGHTS:
        raise PackageError(f"{path}: not a packaged model; its weights must be called {WEIGHTS}")
    config = read_config(folder)
    dictionaries = check_text(folder, config)[:2]
    verify_checksums(folder, [WEIGHTS])
    check_header(place(folder, WEIGHTS), _most_tensors(config["model"]))
    tensors = read_tensors(place(folder, WEIGHTS))
    for name, owner in config["tied"].items():
        if name in tensors or owner not in tensors:
            raise PackageError(f"{os.path.join(folder, CONFIG)}: rejected: {name} cannot be tied to {owner}")
    tensors.update({name: tensors[owner] for name, owner in config["tied"].items()})
    upgrade_layers(tensors)  # older packages of fairseq's models have unused copies
    package = Package(config, tensors, *(read_dictionary(folder, name) for name in dictionaries))
    check_fit(folder, package)
    return package


READERS[".safetensors"] = lambda path: load(path).stored


def text_files(config: dict[str, Any]) -> list[str]:
    """Return the names of the files for text processing: two dictionaries and, if used, sub-words."""
    names = [dictionary_name(config["task"][f"{side}_lang"]) for side in ("source", "target")]
    return names + [name for name in (codes_of(config),) if name]


def check_text(folder: str, config: dict[str, Any]) -> list[str]:
    """Check the :func:`text_files` in *folder* and return their names.

    Raises:
        PackageError: a file is corrupt, or *folder* has other files
    """
    names = text_files(config)
    refuse_others(folder, names)
    verify_checksums(folder, names)
    if config["text"]["sub_words"] == "subword-nmt":
        check_merges(folder, names[2])
    return names


def codes_of(config: dict[str, Any]) -> str | None:
    """Return the name of the file with the sub-words; None without sub-words."""
    return CODES.get(config["text"]["sub_words"])


def check_merges(folder: str, name: str) -> None:
    """Reject invalid subword-nmt merges, for which the library would exit the program.

    Raises:
        PackageError: a line is invalid; the message has its number
    """
    path = place(folder, name)
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(itertools.chain([stream.readline()], stream), 1):  # "" for an empty file
                if number == 1 and line.startswith("#version:"):
                    right = re.fullmatch(r"#version: 0\.[12](\.0)*\s*", line)
                else:
                    right = len(line.strip("\r\n ").split(" ")) == 2
                if not right:
                    kind = "two sub-words, or on top #version: 0.2"
                    raise PackageError(f"{path}: line {number} must be {kind} ({line[:40]!r}); copy it again")
    except UnicodeDecodeError as error:
        raise PackageError(f"{path}: must be UTF-8 ({error.reason}); copy it again") from error


def odd_pieces(path: str) -> list[str]:
    """Return the problems of a SentencePiece model; empty if it can be read.

    Raises:
        ImportError: the library is missing
    """
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        return [f"{path}: not a valid SentencePiece model ({one_line(error, 100)})"]
    return []


def _most_tensors(flags: dict[str, Any]) -> int:
    """Return a number of tensors that no model with these *flags* exceeds; reading a tensor takes 0.1 ms."""
    return 200 * (2 + sum(flags.get(f"{side}_layers") or 6 for side in ("encoder", "decoder")))


def check_header(path: str, most: int) -> None:
    """Reject headers that the library accepts: repeated names, more than *most* tensors, and unlimited metadata.

    Raises:
        PackageError: the header is too large, or :func:`write` could not have written it
    """
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        content = stream.read(min(size, LARGEST_HEADER + 1))
    largest = min(LARGEST_HEADER, 300 * most)
    if largest < size <= os.path.getsize(path):
        raise PackageError(f"{path}: rejected: its header has {size:,} bytes, more than {largest:,}")
    try:
        header = parse(content.decode())
    except ValueError as error:
        reason = one_line(error, 100)
        raise PackageError(f"{path}: truncated or invalid safetensors file ({reason}); copy it again") from error
    if isinstance(header, dict) and len(header) > most + 1:
        raise PackageError(f"{path}: rejected: it has {len(header):,} tensors, more than {most:,} for its depth")
    if isinstance(header, dict) and header.get("__metadata__") not in (None, {"format": "pt"}):
        raise PackageError(f"{path}: rejected because of its metadata; a package must have only the format there")


def read_tensors(path: str) -> dict[str, Tensor]:
    """Read the tensors in the file, each into its own memory.

    Raises:
        PackageError: the file is corrupt, or has tensors of an unsupported type
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise PackageError(f"{path}: {error.name} is missing: pip install safetensors") from error
    tensors: dict[str, Tensor] = OrderedDict()
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                kind = opened.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise PackageError(f"{path}: rejected: {name[:60]!r} has the unsupported type {kind}")
                tensors[name] = opened.get_tensor(name).clone()
                if not torch.isfinite(tensors[name]).all():
                    raise PackageError(f"{path}: rejected: {name[:60]!r} holds NaN or Inf")
    except PackageError:
        raise
    except Exception as error:  # the library's exceptions for a corrupt file have no common type
        reason = one_line(error, 200)
        raise PackageError(f"{path}: truncated or invalid safetensors file ({reason}); copy it again") from error
    return tensors


def read_dictionary(folder: str, name: str) -> Dictionary:
    """Read the dictionary in the file *name*.

    Raises:
        PackageError: the dictionary is invalid
    """
    path = place(folder, name)
    try:
        return Dictionary.load(path)
    except UsageError as error:
        raise PackageError(error.message) from error


def check_fit(folder: str, package: Package) -> None:
    """Reject settings, tensors and dictionaries that do not fit together, by building a model without memory.

    Raises:
        PackageError: with the first difference
    """
    path, flags = os.path.join(folder, CONFIG), package.flags
    for side in ("encoder", "decoder"):
        if (getattr(flags, f"{side}_layers", None) or 0) > len(package.tensors):
            raise PackageError(f"{path}: rejected: {WEIGHTS} does not have that many {side}_layers")
    try:
        with skip_initialisation():
            model = untrained(flags, package.source, package.target)
            differences = state_differences(model.state_dict(), package.tensors)
    except Exception as error:  # invalid settings raise arbitrary exceptions in torch
        reason = one_line(error, 200)
        raise PackageError(f"{path}: rejected: cannot build a model with its settings ({reason})") from error
    if differences:
        where = f"{os.path.join(folder, WEIGHTS)}: does not fit {CONFIG} and the dictionaries"
        raise PackageError(f"{where} ({differences[0]}; {len(differences)} differences)")
