"""The structure of a checkpoint, read with inert placeholders instead of the objects in its pickle."""

import math
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import numpy as np

LARGEST_PICKLE = 1 << 28
"""Maximum size of a pickle, in bytes; the structure of a checkpoint takes some hundred thousand."""
_KINDS = {
    **{"DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2"},
    **{"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1"},
    **{"ByteStorage": "u1", "BoolStorage": "u1"},
}
"""Names of types in torch and numpy; numpy does not support bfloat16."""
_INSTRUCTIONS = {
    getattr(pickle, name)[0]
    for name in (
        "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE BUILD EMPTY_DICT EMPTY_LIST "
        "EMPTY_SET EMPTY_TUPLE GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE "
        "SETITEM SETITEMS SHORT_BINSTRING STOP TUPLE TUPLE1 TUPLE2 TUPLE3"
    ).split()
}
"""Pickle instructions that torch's weights-only loader supports."""
_BLOCK = 1 << 22
_UNFILLED = "._float_tensor"
"""A buffer of sinusoidal positions that fairseq does not initialise."""


class Stand:
    """Placeholder for a class or function that must not be called."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> "Stand":
        return self

    def append(self, value: Any) -> None:
        """Ignore an item of a list."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of a dictionary."""


class Weight(Stand):
    """Placeholder for a tensor, with storage, offset and shape."""

    @property
    def size(self) -> int:
        first, *_ = self.arguments or (None,)
        if isinstance(first, Weight):  # a parameter
            return first.size
        shape = self.arguments[2] if len(self.arguments) > 2 else ()
        lengths = [length for length in shape if isinstance(length, int)] if isinstance(shape, tuple) else []
        return math.prod(lengths)

    @property
    def storage(self) -> Any:
        """The tensor's :class:`Storage`; another object if the file is corrupt."""
        first, *_ = self.arguments or (None,)
        return first.storage if isinstance(first, Weight) else first


class Storage(Stand):
    """Placeholder for a storage, with its reference in the file: ("storage", type, key, device, number, ...)."""

    @property
    def place(self) -> tuple[str, str, int]:
        """Type, key and number of values.

        Raises:
            ValueError: the file is corrupt
        """
        _, kind, key, _, number, *_ = self.arguments[0]
        if not (isinstance(kind, Stand) and isinstance(key, str) and isinstance(number, int) and number >= 0):
            raise ValueError("a storage reference that torch.save does not write")
        return str(kind.arguments[0]), key, number


class Structure(NamedTuple):
    """The result of ``torch.load`` with placeholders, the names that are not allowed, and unusual findings."""

    state: Any
    asked: set[str]
    problems: list[str]


def read_structure(stream: BinaryIO, zipped: bool) -> Structure:
    """Return the structure of the checkpoint in *stream*.

    Raises:
        Exception: the file is corrupt
    """
    if zipped:
        return _read_zip(stream)
    for _ in range(3):  # magic number, version and properties of the machine
        read_pickle(stream)
    storages: list[Storage] = []
    state, asked = read_pickle(stream, storages)
    keys, _ = read_pickle(stream)
    kinds = {storage.place[1]: storage.place[0] for storage in storages}
    names = {storage.place[1]: name for name, storage in _storages(state)}
    problems = []
    for key in keys:
        number = int.from_bytes(stream.read(8), "little")
        odd = _odd_values(stream, kinds[key], number, names.get(key, key))
        problems += odd if key in names else []  # other storages belong to the optimizer
    return Structure(state, asked, problems)


def read_pickle(stream: BinaryIO, storages: list[Storage] | None = None) -> tuple[Any, set[str]]:
    """Read the next pickle in *stream* with placeholders, and return it with names and instructions not allowed.

    Args:
        storages: receives all storages
    """
    import torch
    from fairseq import safe_load

    allowed, places = safe_load.allowed_types(), [] if storages is None else storages
    asked: set[str] = set()
    refused: set[str] = set()

    def noting(code: int, follow: Callable[[Any], None]) -> Callable[[Any], None]:
        def note(reader: Any) -> None:
            refused.add(f"pickle instruction {code}")
            follow(reader)

        return note if safe_load.NAMED_SAFE_GLOBALS and code not in _INSTRUCTIONS else follow

    class Reader(safe_load.RestrictedUnpickler):
        dispatch = {code: noting(code, follow) for code, follow in safe_load.RestrictedUnpickler.dispatch.items()}

        def find_class(self, module: str, name: str) -> Any:
            if module == "torch._utils" and name.startswith("_rebuild"):
                return Weight
            is_plain = name in ("Size", "device") or isinstance(getattr(torch, name, None), torch.dtype)
            if module in ("torch", "torch.storage") and name.endswith("Storage") or module == "torch" and is_plain:
                return Stand(name)
            module = "builtins" if module == "__builtin__" else module
            if f"{module}.{name}" in allowed:
                return allowed[f"{module}.{name}"]
            asked.add(f"{module}.{name}")
            return Stand

        def persistent_load(self, place: Any) -> Storage:
            places.append(Storage(place))
            return places[-1]

    return Reader(stream).load(), asked or refused


def _read_zip(stream: BinaryIO) -> Structure:
    problems: list[str] = []
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            problems.append("it has duplicate names")
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values())
        if packed:
            problems.append("entries are compressed, which torch.save does not do")
        if any(name.endswith("/constants.pkl") for name in entries):
            problems.append("it is a TorchScript program: fairseq rejects it")
        found = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        if len({entry.filename for entry in found}) != 1:
            raise ValueError(f"{len(found)} entries data.pkl instead of one")
        if found[0].file_size > LARGEST_PICKLE:
            raise ValueError(f"a structure of {found[0].file_size:,} bytes")
        with archive.open(found[0]) as opened:
            state, asked = read_pickle(opened)
        empty = [name for name, value in _weights(state) if not isinstance(value.storage, Storage)]
        problems += [f"{name} has no values" for name in empty]
        for name, storage in [] if packed else _storages(state):
            kind, key, number = storage.place
            entry = entries.get(f"{os.path.dirname(found[0].filename)}/data/{key}")
            if entry is None or kind in _KINDS and entry.file_size != number * np.dtype(_KINDS[kind]).itemsize:
                raise ValueError(f"the values of {name} are incomplete")
            with archive.open(entry) as opened:
                problems += _odd_values(opened, kind, number, name)
    return Structure(state, asked, problems)


def _weights(state: Any) -> list[tuple[str, Weight]]:
    """Return the tensors of the model by name."""
    model = state.get("model") if isinstance(state, dict) else None
    return [each for each in model.items() if isinstance(each[1], Weight)] if isinstance(model, dict) else []


def _storages(state: Any) -> list[tuple[str, Storage]]:
    """Return the distinct storages of the model, each with the name of a tensor in it."""
    found: dict[str, tuple[str, Storage]] = {}
    for name, value in _weights(state):
        if isinstance(value.storage, Storage):
            found.setdefault(value.storage.place[1], (str(name), value.storage))
    return list(found.values())


def _odd_values(stream: BinaryIO, kind: str, number: int, name: str) -> list[str]:
    """Return findings in the next *number* values of *stream*."""
    if kind not in _KINDS:
        return [f"{name} has values of the type {kind}, which are not inspected"]
    dtype, odd = np.dtype(_KINDS[kind]), False
    for start in range(0, number, _BLOCK):
        expected = min(_BLOCK, number - start) * dtype.itemsize
        content = stream.read(expected)
        if len(content) < expected:
            raise ValueError(f"the values of {name} are incomplete")
        values = np.frombuffer(content, dtype)
        if kind == "BFloat16Storage":
            odd = odd or bool((values & 0x7F80 == 0x7F80).any())
        elif dtype.kind == "f":
            odd = odd or not np.isfinite(values).all()
    if dtype.kind != "f" and kind != "BFloat16Storage" and name.endswith((".weight", ".bias")):
        return [f"{name} holds whole numbers ({kind}), which are not weights: translation rejects it"]
    return [f"{name} holds NaN or Inf"] if odd and not name.endswith(_UNFILLED) else []
