"""Checksums and locks of files."""

import hashlib
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def checksum(path: str, kind: str = "sha256") -> str:
    """Return the checksum of a file as hexadecimal digits (``hashlib.file_digest`` requires Python 3.11).

    Args:
        kind: an algorithm of :mod:`hashlib`, such as "md5"
    """
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def flock(file: Any, blocking: bool = False) -> None:
    """Lock an open *file* or descriptor for this process.

    Args:
        blocking: if another process holds it, return when it has been released

    Raises:
        BlockingIOError: another process holds it, unless *blocking*
        OSError: the file system or the operating system does not support locks
    """
    if fcntl is None:
        raise OSError("no locks")
    fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
