"""say what a checkpoint, an archive, a data folder or a packaged model holds, and what is out of the ordinary

Nothing of the file is run: the instructions of its pickle are followed with inert stand-ins for whatever they ask for,
and no tensor is read. A packaged model has no pickle: it is read, and its sums are compared. Exit code 0: ordinary, 1:
something is not, 2: unreadable.
"""

import argparse
import contextlib
import math
import os
import pickle
import re
import struct
import tarfile
import zipfile
from typing import Any

import numpy as np

from fairseq_deep.tools import UserError, check_fairseq, format_table, model_flags

LARGEST_PICKLE = 1 << 28
"""Bytes: a checkpoint's structure takes some hundred thousand."""
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}
"""Bytes of an entry, by the type codes of fairseq's mmap indices."""
_ORDINARY = re.compile(
    r"(dict\.[\w-]+\.txt|preprocess\.log|(train|valid|test)\d*\.([\w-]+-[\w-]+|None)\.[\w-]+(\.(idx|bin))?)"
)


class Stand:
    """What takes the place of a class or function that is not to be called."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> "Stand":
        return self

    def append(self, value: Any) -> None:
        """As pickles of lists do."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As pickles of dictionaries do."""


class Weight(Stand):
    """A tensor, of which nothing but its place is known: storage, offset, shape."""

    @property
    def size(self) -> int:
        first, *_ = self.arguments or (None,)
        if isinstance(first, Weight):  # a parameter
            return first.size
        shape = self.arguments[2] if len(self.arguments) > 2 else ()
        lengths = [length for length in shape if isinstance(length, int)] if isinstance(shape, tuple) else []
        return math.prod(lengths)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the paths."""
    parser.add_argument("paths", nargs="+", metavar="FILE|DIR", help="checkpoints, archives, data folders, packages")


def run(args: argparse.Namespace) -> int:
    """Print a table for each path; 1 if any holds something out of the ordinary."""
    check_fairseq()
    odd = False
    for number, path in enumerate(args.paths):
        rows, problems = describe(path)
        rows += [("unusual", problem) for problem in problems] or [("unusual", "nothing")]
        print(("\n" if number else "") + format_table([("path", path), *rows]))
        odd = odd or bool(problems)
    return 1 if odd else 0


def describe(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return what *path* holds, as rows of a table, and what of it is out of the ordinary."""
    from fairseq_deep import packaged

    if packaged.is_package(path):
        return _package(packaged.folder_of(path))
    if os.path.isdir(path):
        return _folder(path)
    try:
        with open(path, "rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if start != b"PK\x03\x04" and tarfile.is_tarfile(path):
        return _archive(path)
    return _checkpoint(path, start == b"PK\x03\x04")


def _checkpoint(path: str, zipped: bool) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        state, asked, problems = _structure(path, zipped)
    except Exception as error:  # whatever a damaged file raises ends in one line
        raise UserError(f"{path} is no readable checkpoint ({type(error).__name__}: {error})") from error
    from fairseq import safe_settings

    rows = [("kind", f"checkpoint, {os.path.getsize(path):,} bytes, {'zip' if zipped else 'pickle'} of torch.save")]
    if not isinstance(state, dict):
        return rows, [*problems, f"it is a {type(state).__name__}, not the dictionary that fairseq saves"]
    model = state.get("model")
    if isinstance(model, dict):
        weights = [value for value in model.values() if isinstance(value, Weight)]
        rows.append(("model", f"{_name(state)}, {len(weights)} tensors, {sum(w.size for w in weights):,} values"))
    else:
        problems.append("it has no model")
    rows.append(("parts", ", ".join(sorted(map(str, state)))))
    problems += [f"asks for {name}, which could run code: loading it is refused" for name in sorted(asked)]
    problems += [f"a setting that is refused: {text}" for text in safe_settings.refused(state)]
    return rows, problems


def _name(state: dict[str, Any]) -> str:
    with contextlib.suppress(Exception):  # settings of any shape
        flags = model_flags(state)
        return str(flags.get("arch") or flags.get("_name") or "unnamed")  # fairseq-hydra-train leaves "_name"
    return "unnamed"


def _structure(path: str, zipped: bool) -> tuple[Any, set[str], list[str]]:
    """What `torch.load` would return, with stand-ins; the names that are not allowed; what is odd about the file."""
    problems: list[str] = []
    if not zipped:
        with open(path, "rb") as stream:
            return (*_read(stream, skip=3), problems)  # magic number, version and facts of the machine come first
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if len(set(names)) < len(names):
            problems.append("names occur twice in it")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            problems.append("entries are compressed, which torch.save does not do")
        if any(name.endswith("/constants.pkl") for name in names):
            problems.append("it is a TorchScript program: loading it is refused")
        found = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError(f"{len(found)} entries data.pkl, not one")
        if found[0].file_size > LARGEST_PICKLE:
            raise ValueError(f"a structure of {found[0].file_size:,} bytes")
        with archive.open(found[0]) as stream:
            return (*_read(stream), problems)


def _read(stream: Any, skip: int = 0) -> tuple[Any, set[str]]:
    from fairseq import safe_load

    allowed, asked = safe_load.allowed_types(), set()

    class Reader(safe_load.RestrictedUnpickler):
        dispatch = dict(safe_load.RestrictedUnpickler.dispatch)

        def find_class(self, module: str, name: str) -> Any:
            if module == "torch._utils" and name.startswith("_rebuild"):
                return Weight
            if module == "torch" or module == "torch.storage" and name.endswith("Storage"):
                return Stand
            module = "builtins" if module == "__builtin__" else module
            if f"{module}.{name}" in allowed:
                return allowed[f"{module}.{name}"]
            asked.add(f"{module}.{name}")
            return Stand

        def persistent_load(self, place: Any) -> Stand:
            return Stand(place)

    for _ in range(skip):
        Reader(stream).load()
    return Reader(stream).load(), asked


def _archive(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    from fairseq import safe_files

    names, problems, total = [], [], 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                names.append(member.name)
                total += member.size
                try:
                    safe_files.checked(member, path)
                except pickle.UnpicklingError as error:
                    problems.append(str(error).partition("because ")[2])
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{path} is no whole archive ({error})") from error
    return [("kind", f"archive, {len(names)} entries, {total:,} bytes unpacked"), ("holds", ", ".join(names))], problems


def _package(folder: str) -> tuple[list[tuple[str, str]], list[str]]:
    from fairseq_deep import packaged

    rows, problems = [("kind", "packaged model")], packaged.find_problems(folder)
    try:
        state = packaged.load(os.path.join(folder, packaged.WEIGHTS))
    except packaged.PackageError as error:
        return rows, problems + [str(error)] * (str(error) not in problems)
    weights = {id(value): value for value in state["model"].values()}.values()  # those that are tied count once
    rows.append(("model", f"{_name(state)}, {len(weights)} tensors, {sum(w.numel() for w in weights):,} values"))
    return rows, problems


def _folder(path: str) -> tuple[list[tuple[str, str]], list[str]]:
    sets, dictionaries, problems = {}, [], []
    for name in sorted(os.listdir(path)):
        place = os.path.join(path, name)
        if not os.path.realpath(place).startswith(os.path.realpath(path) + os.sep):
            problems.append(f"{name!r} is a link to {os.path.realpath(place)}")
        if os.path.isdir(place) or not _ORDINARY.fullmatch(name):
            problems.append(f"{name!r} is nothing that fairseq-preprocess writes")
        elif name.startswith("dict."):
            with open(place, "rb") as stream:
                dictionaries.append(f"{name[5:-4]} {sum(1 for _ in stream):,}")
        elif name.endswith(".idx"):
            count, problem = _index(place)
            sets[name[:-4]] = f"{name[:-4]} {count:,}"
            problems += [f"{name}: {problem}"] if problem else []
    if not sets and not dictionaries:
        problems.append("no data: neither an index (.idx) nor a dictionary is in it")
    rows = [("kind", "data folder"), ("sentences", ", ".join(sets.values()) or "-")]
    return [*rows, ("dictionaries", ", ".join(dictionaries) or "-")], problems


def _index(path: str) -> tuple[int, str]:
    """Number of sentences of an index, and what in it does not fit its data."""
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
