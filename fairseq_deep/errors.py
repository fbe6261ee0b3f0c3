"""The exception for invalid input, and formatting of external text for a terminal."""

import difflib
import os
import unicodedata
from collections.abc import Iterable


class UsageError(Exception):
    """Invalid input. The message is one line: ``problem; fix``.

    It is an ordinary exception. The commands of the fairseq that ``third_party/fairseq`` builds print :attr:`one_line`
    without a traceback and exit with status 1.

    Attributes:
        status: exit status of a command of ``fairseq-deep``
    """

    status = 2

    @property
    def message(self) -> str:
        """The message on one line, without control characters."""
        return one_line(self)

    @property
    def one_line(self) -> str:
        """The message as fairseq's commands print it, with the package's name."""
        return f"fairseq_deep: {self.message}"


def is_switched_off(name: str) -> bool:
    """Return whether the environment variable *name*, which is 1 by default, is 0.

    Raises:
        UsageError: it is neither 0 nor 1
    """
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise UsageError(f"{name} is {printable(value)}; set it to 0 or 1, or unset it")
    return value == "0"


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " (did you mean X?)" for the closest of *names* in any case, or an empty string if none is close."""
    known = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff)
    return f" (did you mean {known[close[0]]}?)" if close else ""


def one_line(text: object, limit: int | None = None) -> str:
    """Return *text*, such as a library's exception, on one line; for an exception without a message, its type."""
    line = " ".join(str(text).split())
    return printable(line or (type(text).__name__ if isinstance(text, BaseException) else ""), limit)


def printable(text: object, limit: int | None = 200) -> str:
    """Return *text* without line breaks and terminal control sequences.

    Control and format characters, line separators and surrogates become backslash escapes. Text longer than *limit*
    characters is truncated and ends in "...".
    """
    shown = "".join(
        char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in _HIDDEN else char
        for char in str(text)
    )
    return shown if limit is None or len(shown) <= limit else f"{shown[: limit - 3]}..."


_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode's categories of control, format, surrogate and private characters, and of line and paragraph separators."""
