"""Named choices of one design axis.

A registry maps the value of a command line flag (``--layer-agg dlcl``) to the class behind it.
Each method registers itself where it is defined, so adding a method changes no existing file.
"""

import difflib
from typing import Any, Callable, Dict, Iterable, List


class UsageError(SystemExit):
    """A mistake in how the package is used, told in one line that names the problem and the cure.

    It derives from :class:`SystemExit`, so that fairseq's command line tools (which would wrap or print a
    traceback for any ``Exception``) print the line alone and exit with status 1. Code that builds models
    itself catches ``UsageError``.
    """

    def __init__(self, message: str):
        super().__init__(f"fairseq_deep: {message}")


def nearest(name: str, names: Iterable[str]) -> str:
    """" (did you mean X?)" for the closest of *names*, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


class Registry:
    """A dictionary of named classes with a decorator to fill it and errors that help.

    Args:
        kind: what the entries are, as the flag calls it ("--layer-agg")
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: Dict[str, Any] = {}

    def register(self, name: str) -> Callable:
        """Class decorator: make the class known as *name*.

        Raises:
            ValueError: *name* is taken by another class
        """

        def add(entry):
            taken = self._entries.get(name)
            if taken is not None and taken.__qualname__ != entry.__qualname__:
                raise ValueError(f"{self.kind} {name} is already registered by {taken.__qualname__}")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> List[str]:
        return sorted(self._entries)

    def get(self, name: str) -> Any:
        """The class registered as *name*.

        Raises:
            UsageError: there is none; the message names the nearest and all of them
        """
        if name not in self._entries:
            raise UsageError(
                f"unknown {self.kind} {name}{nearest(name, self._entries)}; choose from {', '.join(self.names())}"
            )
        return self._entries[name]

    def check(self, name: str) -> str:
        """*name* itself if it is registered: the ``type=`` of a command line flag."""
        self.get(name)
        return name
