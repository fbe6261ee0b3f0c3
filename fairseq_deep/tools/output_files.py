"""Checks of output paths before long computations, and atomic writing."""

import contextlib
import csv
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fairseq_deep.errors import UsageError


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
    _check_parent(path, os.path.dirname(path) or ".")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"cannot write {path}: it exists and is not a regular file; give another name")


def _check_parent(path: str, folder: str) -> None:
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {path}: the directory {folder} does not exist; create it first")
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
    _check_parent(path, os.path.dirname(os.path.normpath(path)) or ".")


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


def write_csv(path: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with the *names* of its columns as CSV, atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])
