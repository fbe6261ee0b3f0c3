"""Access to a package in a local directory or on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.packaged.folder import CARD, CONFIG, SUMS

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of ``from_pretrained`` that select a file on the Hub."""


def find_package(path: str | os.PathLike, weights: bool = True, **hub: Any) -> packaged.Package:
    """Read the package *path*.

    Args:
        path: a directory, or the name of a repository
        weights: whether to read the weights
        hub: see :data:`HUB`

    Raises:
        UsageError: the package does not exist, or is invalid
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        return packaged.load(os.path.join(path, hub.get("subfolder") or ""), weights)
    try:
        folder = os.path.dirname(cached_file(path, CONFIG, **hub))
        cached_file(path, SUMS, **hub)
        with contextlib.suppress(OSError):  # the card is optional
            cached_file(path, CARD, **hub)
        config = packaged.read_config(packaged.Folder(folder, cached=True))
        for name in [*packaged.text_files(config), *[packaged.WEIGHTS] * weights]:
            cached_file(path, name, **hub)
    except OSError as error:
        raise UsageError(f"{path}: neither a directory nor a packaged model on the Hub ({error})") from error
    return packaged.load(folder, weights, cached=True)


def read_files(paths: dict[str, str]) -> dict[str, bytes]:
    """Return the content of files by name."""
    return {name: Path(path).read_bytes() for name, path in paths.items()}


@contextlib.contextmanager
def written(files: dict[str, bytes]) -> Iterator[str]:
    """Yield a temporary directory with *files*."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, files)
        yield folder


def write_files(folder: str, files: dict[str, bytes]) -> None:
    """Write *files* to *folder*."""
    for name, content in files.items():
        Path(folder, name).write_bytes(content)


@contextlib.contextmanager
def filled(folder: str) -> Iterator[str]:
    """Yield an empty directory and move its files to *folder* if no error occurs, the checksums last.

    Raises:
        UsageError: *folder* cannot be written
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as new:
            yield new
            for name in sorted(os.listdir(new), key=lambda name: (name == SUMS, name)):
                os.replace(os.path.join(new, name), os.path.join(folder, name))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror or error}); choose another directory") from error
