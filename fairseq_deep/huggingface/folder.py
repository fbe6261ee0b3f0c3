"""Access to a package in a local directory or on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from transformers.utils import cached_file

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.packaged.folder import CARD, CONFIG, SUMS

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of ``from_pretrained`` that select a file on the Hub."""


@contextlib.contextmanager
def local_folder(path: str | os.PathLike, weights: bool = True, **hub: Any) -> Iterator[str]:
    """Yield the directory of the package *path*.

    The Hub's cache consists of links, which packages must not contain. Therefore a package from the Hub is copied to a
    temporary directory.

    Args:
        path: a directory, or the name of a repository
        weights: whether to download the weights
        hub: see :data:`HUB`

    Raises:
        UsageError: the package does not exist
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        yield os.path.join(path, hub.get("subfolder") or "")
        return
    with tempfile.TemporaryDirectory() as folder:

        def fetch(name: str) -> None:
            shutil.copyfile(cached_file(path, name, **hub), os.path.join(folder, name))

        try:
            for name in (CONFIG, SUMS):
                fetch(name)
            with contextlib.suppress(OSError):  # the card is optional
                fetch(CARD)
            for name in [*packaged.text_files(packaged.read_config(folder)), *[packaged.WEIGHTS] * weights]:
                fetch(name)
        except OSError as error:
            raise UsageError(f"{path}: neither a directory nor a packaged model on the Hub ({error})") from error
        yield folder


def read_files(folder: str, names: list[str]) -> dict[str, bytes]:
    """Return the content of the files *names*."""
    found = {}
    for name in names:
        with open(os.path.join(folder, name), "rb") as stream:
            found[name] = stream.read()
    return found


@contextlib.contextmanager
def written(files: dict[str, bytes]) -> Iterator[str]:
    """Yield a temporary directory with *files*."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            with open(os.path.join(folder, name), "wb") as stream:
                stream.write(content)
        yield folder


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
