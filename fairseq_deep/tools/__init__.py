"""The command ``fairseq-deep``: one module per sub-command (listed in `main.py`), and common functions."""

import argparse
import contextlib
import gzip
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from fairseq_deep.errors import UsageError
from fairseq_deep.plugin import compat
from fairseq_deep.plugin.compat import model_flags as model_flags  # re-exported for the tools
from fairseq_deep.runtime import records

_USED = ("model", "task", "checkpoint")
"""Sections of a configuration that the tools read."""
_SPACES = ("cfg.model", "cfg.task")
"""Sections that may be an ``argparse.Namespace``."""


def at_least_one(text: str) -> int:
    """Parse an argument: a whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def flags_of(words: Iterable[str]) -> dict[str, str]:
    """Return {flag: its last value} for the words of a fairseq-train command; "" for a flag without a value."""
    found: dict[str, str] = {}
    flag = None
    for word in words:
        if re.match(r"--?[a-zA-Z]", word):
            flag, _, value = word.partition("=")
            found[flag] = value
        elif flag:
            found[flag] = f"{found[flag]} {word}".strip()
    return found


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Format `rows` as aligned columns; columns with an index in `right` are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def check_outputs(outputs: Sequence[str | None], inputs: Sequence[str | None], own: Sequence[str] = ()) -> None:
    """Raise `UsageError` if an output cannot be written, is given twice, or would replace an input.

    Files are compared by identity, also through symbolic and hard links. All files in an input directory, and next to a
    package's weights, are inputs.

    Args:
        outputs: files; None is ignored
        inputs: files and directories; "-" is standard input, and None is ignored
        own: names of files in an input directory that the command writes itself
    """
    written: dict[str, str] = {}
    sources = [path for path in inputs if path is not None]
    sources += [os.path.dirname(path) or "." for path in sources if path.endswith(".safetensors")]
    for path in filter(None, outputs):
        check_output_path(path)
        place = os.path.realpath(path)
        if place in written:
            raise UsageError(f"cannot write {path}: {written[place]} is the same file; give another name")
        written[place] = path
        for source in sources:
            if _holds(source, path, own):
                shown = "standard input" if source == "-" else source
                raise UsageError(f"cannot write {path}: it is an input ({shown}); give another name")


def _holds(source: str, path: str, own: Sequence[str]) -> bool:
    """Return whether the existing file `path` is `source`, or is in the directory `source` and not in `own`."""
    with contextlib.suppress(OSError):
        if not os.path.isdir(source):
            return os.path.samefile(0 if source == "-" else source, path)
        seen = set()
        for folder, folders, names in os.walk(source, followlinks=True):
            place = os.path.realpath(folder)
            if place in seen:
                folders.clear()  # a cyclic link
                continue
            seen.add(place)
            for name in names:
                with contextlib.suppress(OSError):
                    if os.path.samefile(os.path.join(folder, name), path):
                        return not (folder == source and name in own)
    return False


def check_output_path(path: str) -> None:
    """Raise `UsageError` if a file cannot be written at `path`; called before long computations."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {path}: the directory {folder} does not exist; create it first")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"cannot write {path}: it exists and is not a regular file; give another name")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: the directory {folder} is not writable; choose another one")


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary name next to `path`, for a file or a directory.

    The file or directory is renamed to `path` on success, and removed after an error.
    """
    temporary = f"{os.path.abspath(path)}.tmp{os.getpid()}"
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def check_new_folder(path: str) -> None:
    """Raise `UsageError` if no directory can be created at `path`; called before long computations."""
    if os.path.lexists(path) and (not os.path.isdir(path) or os.path.islink(path) or os.listdir(path)):
        raise UsageError(f"cannot write {path}: it exists and is not an empty directory; give another name")
    parent = os.path.dirname(os.path.normpath(path)) or "."
    if not os.path.isdir(parent):
        raise UsageError(f"cannot write {path}: the directory {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"cannot write {path}: the directory {parent} is not writable; choose another one")


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Yield an empty directory and rename it to `path` on success; raise `UsageError` if this is not possible."""
    check_new_folder(path)
    with replacing(path) as temporary:
        os.mkdir(temporary)
        yield temporary


def write_text(path: str, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def stdin() -> BinaryIO:
    """Return standard input.

    Raises:
        UsageError: the caller has closed it
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed; redirect it from a file")
    return sys.stdin.buffer


def read_lines(path: str, may_be_empty: bool = False) -> list[str]:
    r"""Return the lines of a UTF-8 file, split only at ``\n`` or ``\r\n``: lines may contain U+2028 or U+0085.

    A byte order mark is skipped, and a file compressed by gzip is decompressed.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, or is empty without *may_be_empty*
    """
    try:
        if path == "-":
            data = stdin().read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        text = data.decode("utf-8").removeprefix("\ufeff")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path} is not UTF-8 (line {line}); decompress it, or convert it with iconv") from error
    if not text:
        if may_be_empty:
            return []
        raise UsageError(f"{path} is empty (0 lines)")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def load_checkpoint(path: str) -> dict[str, Any]:
    """Return the fairseq checkpoint at `path`; raise `UsageError` if it is invalid or cannot be read."""
    if os.path.isdir(path):
        names = ("model.safetensors", *records.CHECKPOINTS, "checkpoint_best.pt", "checkpoint_last.pt")
        name = next((name for name in names if os.path.isfile(os.path.join(path, name))), None)
        cure = "give a checkpoint" if name is None else f"give {os.path.join(path, name)}"
        raise UsageError(f"{path} is a directory, not a checkpoint: {cure}")
    try:
        state = compat.load_checkpoint(path)
    except Exception as error:  # a corrupt or rejected file raises any exception
        raise UsageError(f"cannot load {path}: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UsageError(f"{path} is not a fairseq checkpoint (it has no 'model')")
    problem = _odd_part(state)
    if problem:
        raise UsageError(f"{path} is not a complete fairseq checkpoint: {problem}")
    return state


def _odd_part(state: dict[str, Any]) -> str:
    """Return a description of an invalid part of a checkpoint; empty if all parts are valid."""
    import torch

    config, old, extra = state.get("cfg"), state.get("args"), state.get("extra_state")
    sections = dict(config) if hasattr(config, "keys") else {}
    for name, part in (("extra_state", extra), ("cfg", config), *((f"cfg.{key}", sections.get(key)) for key in _USED)):
        if part is not None and not hasattr(part, "keys") and not (name in _SPACES and hasattr(part, "__dict__")):
            return f"its {name} is a {type(part).__name__}"
    if old is not None and not isinstance(old, argparse.Namespace):
        return f"its args are a {type(old).__name__}"
    if not state["model"]:
        return "its model is empty"
    for key, value in state["model"].items():
        if not isinstance(key, str):
            return f"a parameter has the name {key!r}"
        if torch.is_tensor(value) and (value.layout != torch.strided or value.is_meta or value.is_quantized):
            return f"{key} is a {'meta' if value.is_meta else 'quantised' if value.is_quantized else 'sparse'} tensor"
    return ""


def save_checkpoint(state: dict[str, Any], path: str) -> None:
    """Write a checkpoint atomically."""
    import torch

    try:
        with replacing(path) as temporary:
            torch.save(state, temporary)
    except RuntimeError as error:  # raised by torch on a full disk
        raise UsageError(f"cannot write {path}: {error}") from error


def check_fairseq() -> None:
    """Raise `UsageError` if fairseq cannot be imported."""
    error = compat.FAIRSEQ_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name == "fairseq":
        raise UsageError("this requires fairseq, which is not installed; see docs/install.md")
    if error is not None:
        raise UsageError(f"this requires fairseq, which cannot be imported ({error}); run 'fairseq-deep doctor'")
