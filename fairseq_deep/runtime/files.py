"""Checksums and locks of files."""

import hashlib
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def checksum(path: str, kind: str = "sha256") -> str:
    """Return the checksum of a file as hexadecimal digits.

    Args:
        kind: an algorithm of :mod:`hashlib`, such as "md5"
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


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
