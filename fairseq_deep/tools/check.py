"""inspect a checkpoint, an archive, a data directory or a packaged model, and report unusual content

The command never runs code from the file: fairseq's safe loader reads it, and rejects names that could. Weights are
searched for NaN and Inf. A packaged model has no pickle: it is read, and its checksums are verified. Exit code 0:
nothing unusual, 1: something is unusual or cannot be inspected, 2: unreadable.
"""

import argparse
import codecs
import contextlib
import os
import pickle
import re
import shutil
import stat
import struct
import tarfile
import tempfile
from typing import Any, BinaryIO

import numpy as np
import torch

from fairseq_deep.core.description import describe as describe_model
from fairseq_deep.errors import UsageError, one_line, printable
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.exported import program_of
from fairseq_deep.runtime.text import Pieces
from fairseq_deep.tools.checkpoints import check_fairseq, model_flags
from fairseq_deep.tools.structure import names_in_pickle, read_structure
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep check checkpoint_best.pt data-bin"
_LONGEST = 4000
"""Maximum number of characters in a cell of the table."""
_MOST = 50
"""Maximum number of findings to print."""
_ZIP = b"PK\x03\x04"
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}
"""Bytes per entry, by the type codes of fairseq's mmap indices."""
_ORDINARY = re.compile(
    r"(dict\.[\w-]+\.txt|preprocess\.log|alignment\.[\w-]+\.txt|"
    r"(train|valid|test)\d*\.(align\.[\w-]+|([\w-]+-[\w-]+|None)\.[\w-]+)(\.(idx|bin))?)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the paths."""
    kinds = "checkpoints, archives, data directories, packages"
    parser.add_argument("paths", nargs="+", metavar="FILE|DIR", help=kinds)


def run(args: argparse.Namespace) -> int:
    """Print a table per path; return 1 if any has unusual or uninspected content."""
    odd = False
    for number, path in enumerate(args.paths):
        try:
            rows, problems = describe(path)
        except UsageError:
            raise
        except Exception as error:  # an invalid file raises any exception
            told = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error, 200)}"
            raise UsageError(f"cannot read {path}: {told}; copy it again") from error
        rows += [("unusual", problem) for problem in problems[:_MOST]]
        if len(problems) > _MOST:
            rows.append(("unusual", f"{len(problems) - _MOST:,} more findings"))
        rows += [] if problems else [("unusual", "nothing")]
        cells = [(name, printable(text, _LONGEST)) for name, text in [("path", path), *rows]]
        print(("\n" if number else "") + format_table(cells))
        odd = odd or bool(problems) or any(name == "uninspected" for name, _ in rows)
    return 1 if odd else 0


def describe(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the content of *path* as rows of a table, and a list of unusual findings."""
    if program := program_of(path):
        files = ", ".join(sorted(os.listdir(packaged.folder_of(path))))
        return [("kind", f"model for {program}"), ("uninspected", files)], []
    if packaged.is_package(path):
        return _package(packaged.folder_of(path))
    mode = os.stat(path).st_mode  # opening a FIFO would block until another process writes to it
    if stat.S_ISDIR(mode):
        return _folder(path)
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot read {path}: it must be a regular file or a directory")
    check_fairseq()
    with open(path, "rb") as stream:
        if stream.read(4) != _ZIP and tarfile.is_tarfile(path):
            return _archive(path)
        row, rows, problems = _checkpoint(stream)
    return [("kind", row), *rows], problems


def _checkpoint(stream: BinaryIO) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return kind and content of a checkpoint, and a list of unusual findings."""
    from fairseq import safe_settings

    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    zipped = stream.read(4) == _ZIP
    stream.seek(0)
    state, problems = read_structure(stream, zipped)
    kind, rows = f"checkpoint, {size:,} bytes, {'zip' if zipped else 'pickle'} of torch.save", []
    if state is None and problems:
        return kind, rows, problems
    if not isinstance(state, dict):
        return kind, rows, [*problems, f"it is a {type(state).__name__}, not the dictionary that fairseq saves"]
    model = state.get("model")
    if isinstance(model, dict):
        weights = [value for value in model.values() if torch.is_tensor(value)]
        rows.append(("model", f"{_name(state)}, {len(weights)} tensors, {sum(w.numel() for w in weights):,} values"))
        others = [name for name, value in model.items() if not torch.is_tensor(value)]
        if others:
            problems.append(f"{len(others):,} parts of the model are not tensors, such as {others[0]}")
    if not model:
        problems.append("it has no model")
    rows.append(("parts", ", ".join(sorted(map(str, state)))))
    refused = safe_settings.refused(state)
    problems += [f"a setting that is rejected: {text}" for text in refused] or _contradictions(state)
    with contextlib.suppress(RecursionError):  # already rejected above
        dropped = safe_settings.drop(state, "")
        problems += [f"a setting that names a file, which is ignored: {text}" for text in dropped]
    return kind, rows, problems


def _name(state: dict[str, Any]) -> str:
    with contextlib.suppress(Exception):  # invalid settings
        flags = model_flags(state)
        return str(flags.get("arch") or flags.get("_name") or "unnamed")  # fairseq-hydra-train stores only "_name"
    return "unnamed"


def _contradictions(state: dict[str, Any]) -> list[str]:
    """Return the reason why no model can be built from the settings; empty also for models of other packages."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

    arch = _name(state)
    if ARCH_MODEL_REGISTRY.get(arch) is not DeepTransformerModel:
        return []
    try:
        flags = argparse.Namespace(**model_flags(state))
        ARCH_CONFIG_REGISTRY[arch](flags)
        describe_model(flags)
        depth = max(flags.encoder_layers or 0, flags.decoder_layers or 0)
        if depth > len(state["model"]):
            raise UsageError(f"it has fewer tensors than {depth:,} layers")
    except Exception as error:  # invalid settings raise arbitrary exceptions in fairseq
        return [f"cannot build a model with its settings: {one_line(error)}"]
    return []


def _archive(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    from fairseq import safe_files

    names, problems, total, dark = [], [], 0, []
    with tarfile.open(path) as archive:
        for member in archive:
            names.append(member.name)
            total += member.size
            if printable(member.name, None) != member.name:
                problems.append(f"{member.name} is a name with control characters")
            try:
                safe_files.checked(member, path)
            except pickle.UnpicklingError as error:
                problems.append(one_line(error))
            opened = archive.extractfile(member) if member.isreg() else None
            if opened is not None:
                found = _member(opened, member.name)
                dark += [member.name] if found is None else []
                problems += [f"{member.name}: {problem}" for problem in found or ()]
    rows = [("kind", f"archive, {len(names)} entries, {total:,} bytes unpacked"), ("holds", ", ".join(names))]
    return rows + [("uninspected", ", ".join(dark))] * bool(dark), problems


def _member(opened: Any, name: str) -> list[str] | None:
    """Return unusual findings in a file of an archive; None if it is neither a checkpoint nor text."""
    start = opened.read(4)
    opened.seek(0)
    if start == _ZIP or start[:1] == b"\x80" or name.endswith((".pt", ".pth")):
        with tempfile.TemporaryFile() as stream:  # seeking in an archive is slow
            try:
                shutil.copyfileobj(opened, stream)
                return _checkpoint(stream)[2]
            except Exception:  # a corrupt file raises any exception, and the disk may be full
                return None
    if not _is_text(opened):
        return None
    opened.seek(0)
    with contextlib.suppress(Exception):  # text that is not a pickle, such as a dictionary
        return names_in_pickle(opened)
    return []


def _is_text(stream: BinaryIO) -> bool:
    blocks = iter(lambda: stream.read(1 << 20), b"")
    try:
        return not any("\0" in text for text in codecs.iterdecode(blocks, "utf-8"))
    except UnicodeDecodeError:
        return False


def _package(folder: str) -> tuple[list[tuple[str, str]], list[str]]:
    rows, problems = [("kind", "packaged model")], packaged.find_problems(folder)
    try:
        package = packaged.load(folder)
    except UsageError as error:
        return rows, problems + [str(error)] * (str(error) not in problems)
    weights = {id(value): value for value in package.tensors.values()}.values()  # tied tensors count once
    size = sum(weight.numel() for weight in weights)
    rows.append(("model", f"{package.config['arch']}, {len(weights)} tensors, {size:,} values"))
    try:
        if packaged.CODES["sentencepiece"] in package.paths:
            Pieces(package.paths[packaged.CODES["sentencepiece"]])
    except UsageError as error:
        problems.append(error.message)
    except ImportError:
        rows.append(("uninspected", f"{packaged.CODES['sentencepiece']} (pip install sentencepiece)"))
    return rows, problems


def _folder(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    sets: dict[str, int] = {}
    dictionaries, problems = [], []
    for name in sorted(os.listdir(path)):
        place = os.path.join(path, name)
        if not os.path.realpath(place).startswith(os.path.realpath(path) + os.sep):
            problems.append(f"{name!r} is a link to {os.path.realpath(place)}")
        if os.path.isdir(place) or not _ORDINARY.fullmatch(name):
            problems.append(f"{name!r} is not a file that fairseq-preprocess writes")
        elif not os.path.isfile(place):  # opening a FIFO would block until another process writes to it
            problems.append(f"{name!r} is not a regular file, and is not read")
        elif name.startswith("dict."):
            with open(place, "rb") as stream:
                dictionaries.append(f"{name[5:-4]} {sum(1 for _ in stream):,}")
        elif name.endswith(".idx"):
            sets[name[:-4]], problem = _index(place)
            problems += [f"{name}: {problem}"] if problem else []
        elif name.startswith(("train", "valid", "test")) and not name.endswith(".bin"):  # of --dataset-impl raw
            with open(place, "rb") as stream:
                sets[name] = sum(1 for _ in stream)
    if not sets and not dictionaries:
        problems.append("no data: it has neither an index (.idx) nor a dictionary")
    pairs: dict[str, set[int]] = {}
    for name, count in sets.items():
        pair = name.replace(".align", "") if ".align." in name else name.rpartition(".")[0]
        pairs.setdefault(pair, set()).add(count)
    problems += [f"{pair}: unequal numbers of sentences" for pair, counts in pairs.items() if len(counts) > 1]
    sentences = ", ".join(f"{name} {count:,}" for name, count in sets.items())
    rows = [("kind", "data directory"), ("sentences", sentences or "-")]
    return [*rows, ("dictionaries", ", ".join(dictionaries) or "-")], problems


def _index(path: str) -> tuple[int, str]:
    """Return the number of sentences of an index, and a description of a mismatch with its data."""
    with open(path, "rb") as stream:
        head = stream.read(26)
        if len(head) < 26 or head[:9] != b"MMIDIDX\x00\x00":
            return 0, "" if head[:8] == b"TNTIDX\x00\x00" else "not an index of fairseq"
        version, code, count = struct.unpack("<QBQ", head[9:])
        if version != 1 or code not in _SIZES:
            return 0, f"version {version}, type {code}"
        body = stream.read()
    if len(body) != 12 * count:
        return count, f"{count:,} sentences in {len(body):,} bytes"
    sizes = np.frombuffer(body, "<i4", count).astype(np.float64)
    places = np.frombuffer(body, "<i8", count, 4 * count).astype(np.float64)
    data = os.path.getsize(path[:-3] + "bin") if os.path.exists(path[:-3] + "bin") else -1
    if data < 0:
        return count, "its .bin is missing"
    outside = (sizes < 0) | (places < 0) | (places + sizes * _SIZES[code] > data)
    return count, "sentences outside of its .bin" if outside.any() else ""
