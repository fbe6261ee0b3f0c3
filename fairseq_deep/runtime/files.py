"""Text, checksums and locks of files."""

import hashlib
import os
import stat
from typing import Any

from fairseq_deep.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LARGEST_TEXT = 1 << 28
"""Maximum size of a text file, in bytes."""


def read_text(path: str, fix: str, largest: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """Return the content of an untrusted text file.

    Args:
        fix: a fix for the user; the error ends with it
        largest: maximum size, in bytes
        errors: handling of bytes that are not UTF-8, as in :meth:`bytes.decode`

    Raises:
        UsageError: the file is missing, not regular, too large, or not UTF-8
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a FIFO would block until another process writes to it
            raise UsageError(f"{path}: must be a regular file; {fix}")
        if found.st_size > largest:
            raise UsageError(f"{path}: must have at most {largest:,} bytes; {fix}")
        with open(path, "rb") as stream:
            return stream.read().decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: must be UTF-8 ({error.reason}); {fix}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); {fix}") from error


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
