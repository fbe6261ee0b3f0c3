"""Text from files and standard input."""

import gzip
import sys
import zlib
from typing import BinaryIO

from fairseq_deep.errors import UsageError


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
