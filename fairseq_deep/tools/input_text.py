"""Text from files and standard input."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import BinaryIO

from fairseq_deep.errors import UsageError

PACKED = b"\x1f\x8b"
"""The first bytes of a text that is compressed by gzip."""


def stdin() -> BinaryIO:
    """Return standard input.

    Raises:
        UsageError: the caller has closed it
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed; redirect it from a file")
    return sys.stdin.buffer


def decode_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text, split only at ``\n`` or ``\r\n``: lines may contain U+2028 or U+0085.

    A byte order mark is skipped, and a text compressed by gzip is decompressed.

    Args:
        name: name of the text in messages

    Raises:
        UsageError: the text cannot be read, or is not UTF-8
    """
    number = 0
    try:
        stream = gzip.open(stream) if stream.peek(2).startswith(PACKED) else stream
        for number, line in enumerate(stream, 1):
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8" if number > 1 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 (line {number}); decompress it, or convert it with iconv") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {name} after line {number}: {reason}; copy it again") from error


def iterate_lines(path: str) -> Iterator[str]:
    """Yield the lines of a file, or of standard input ("-"), like `decode_lines`."""
    try:
        opened = nullcontext(stdin()) if path == "-" else open(path, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    with opened as file:
        yield from decode_lines(file, path)


def read_lines(path: str, may_be_empty: bool = False) -> list[str]:
    """Return the lines that `iterate_lines` yields.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, or is empty without *may_be_empty*
    """
    lines = [*iterate_lines(path)]
    if not lines and not may_be_empty:
        raise UsageError(f"{path} is empty (0 lines)")
    return lines


def text_of(path: str) -> str:
    """Return the text of a file; empty if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""
