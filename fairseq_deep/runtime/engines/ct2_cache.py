"""Cache of converted models on disk; each model is converted and checked only once.

An entry is a directory with CTranslate2's files and a record of the model's properties, the result of the check and
the checksum of each file. Its name is a hash of the checkpoint, the dictionaries, the type of the weights and the
versions of the format and of CTranslate2; for a packaged model, a hash of all its files. An entry is written under a
temporary name and renamed under a lock. If several processes write the same entry, the first one is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from filelock import FileLock

from fairseq_deep.core.user_cache import user_cache
from fairseq_deep.errors import UsageError

from .. import packaged
from ..bundle import Bundle
from ..files import checksum
from ..records import amount, line, needed, optional, read_json, truth, whole

FORMAT = 1
"""Version of entries. Raise it if the conversion or its check changes; earlier entries are then not used."""
RECORD = "fairseq_deep.json"
UNFINISHED, LOCK = "unfinished-", ".lock"
STALE = 24 * 3600
"""Age in seconds after which an unfinished entry is considered abandoned."""
SCHEMA = {
    "task": needed({"source_lang": needed(optional(line)), "target_lang": needed(optional(line))}),
    "facts": needed({
        "arch": needed(optional(line)), "parameters": needed(amount), "layers": needed([whole(1, 1 << 20)]),
        "max_source": needed(amount), "max_target": needed(amount), "pads_left": needed(truth),
    }),
    "report": needed(line),
    "problem": needed(line),
    "files": needed({"*": line}),
}  # fmt: skip
"""``problem`` is the reason of a failed check; such an entry has no other file."""


class Damaged(Exception):
    """A corrupt entry."""


def default_folder() -> str:
    """Return the directory of entries, in the user's cache directory (XDG)."""
    return user_cache("ctranslate2")


def key_of(bundle: Bundle, quantization: str) -> str:
    """Return the name of a model's entry.

    Raises:
        UsageError: a file cannot be read, or a packaged model is invalid
    """
    import ctranslate2

    parts = [FORMAT, ctranslate2.__version__, quantization, bundle.source_lang, bundle.target_lang]
    for path in _files_of(bundle):
        try:
            parts += ["" if path == bundle.checkpoint else os.path.basename(path), checksum(path)]
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _files_of(bundle: Bundle) -> list[str]:
    """Return the checkpoint and the dictionaries; for a package all files, so a changed package has another entry."""
    names = sorted(os.listdir(bundle.data)) if os.path.isdir(bundle.data) else []
    paths = [os.path.join(bundle.data, name) for name in names if name.startswith("dict.") and name.endswith(".txt")]
    paths = [bundle.checkpoint, *filter(os.path.isfile, paths)]
    if packaged.is_package(bundle.checkpoint):
        folder = packaged.folder_of(bundle.checkpoint)
        paths += [packaged.place(folder, name) for name in sorted(os.listdir(folder))]
    return paths


def read(folder: str) -> dict[str, Any] | None:
    """Return the record of the entry *folder*; None if the entry does not exist.

    Raises:
        Damaged: a file is missing or corrupt
    """
    if not os.path.lexists(folder):
        return None
    try:
        record = read_json(os.path.join(folder, RECORD), SCHEMA, "it is written again")
        if not record:
            raise Damaged(f"{RECORD} is missing")
        for name, known in record["files"].items():
            if checksum(os.path.join(folder, os.path.basename(name))) != known:
                raise Damaged(f"{name} has another checksum")
    except (OSError, UsageError) as error:
        raise Damaged(str(error)) from error
    return record


def write(folder: str, fill: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Write a missing or corrupt entry, unless another process has done so.

    Args:
        folder: the entry
        fill: fills an empty directory, and returns the record without its "files"

    Returns:
        the record

    Raises:
        OSError: the entry cannot be written
    """
    root = os.path.dirname(folder)
    os.makedirs(root, mode=0o700, exist_ok=True)
    _remove_stale(root)
    work = tempfile.mkdtemp(prefix=UNFINISHED, dir=root)
    try:
        new = os.path.join(work, "model")
        os.mkdir(new)
        record = fill(new)
        record["files"] = {name: checksum(os.path.join(new, name)) for name in sorted(os.listdir(new))}
        with open(os.path.join(new, RECORD), "w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=1)
        with FileLock(os.path.join(root, LOCK)):  # otherwise, a process might replace a valid entry of another one
            if not _is_whole(folder):
                if os.path.lexists(folder):
                    os.rename(folder, os.path.join(work, "old"))
                os.rename(new, folder)
        return record
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_whole(folder: str) -> bool:
    try:
        return read(folder) is not None
    except Damaged:
        return False


def _remove_stale(root: str) -> None:
    for entry in os.scandir(root):
        with contextlib.suppress(OSError):
            if entry.name.startswith(UNFINISHED) and entry.stat().st_mtime < time.time() - STALE:
                shutil.rmtree(entry.path, ignore_errors=True)
