"""Registries of the methods of each design axis.

A registry maps the value of a command line flag (``--layer-agg dlcl``) to a class. Each method registers itself in its
own file, so adding a method changes no existing file.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fairseq_deep.errors import UsageError

from .stack import MethodConfig, Stack


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " (did you mean X?)" for the closest of *names*, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


class Method:
    """Base class of the methods of all axes: flags, and properties that are known before a method is built.

    A method is built from the description of its stack and its own options. A command line flag ``--PREFIX-OPTION``
    (PREFIX: *flag_prefix*, by default the registered name) sets the constructor's argument OPTION. If a method adds
    ``--encoder-PREFIX-OPTION`` or ``--decoder-PREFIX-OPTION``, that flag overrides it for one stack.

    Attributes:
        flag_prefix: the PREFIX of its flags if it differs from the name, or several methods share flags
        decoder_options: options that only apply to decoders
        paper: first author and year of the paper, for lists; "" if there is none
    """

    flag_prefix = ""
    decoder_options: tuple[str, ...] = ()
    paper = ""

    @staticmethod
    def add_args(parser) -> None:
        """Add the method's flags, without defaults: an architecture can then set them."""

    @classmethod
    def inner_method(cls, options: dict[str, Any]) -> str | None:
        """Return the name of an inner method of the same axis, which the constructor gets as *inner*; None for none."""
        return None

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        """Reject stacks and options that the method does not support.

        Args:
            stack: the stack of the method
            other: the other stack
            options: options of the method

        Raises:
            UsageError: one line with the flags and the fix
        """


# arguments of constructors that are not options
_PLACES = ("self", "stack", "number", "encoder", "decoder", "inner")


class Registry:
    """Dictionary of named classes, filled by a decorator, with helpful errors.

    Args:
        kind: the flag that chooses an entry ("--layer-agg")
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable:
        """Return a class decorator that registers a class as *name*.

        Raises:
            ValueError: another class has this *name*
        """

        def add(entry):
            taken = self._entries.get(name)
            if taken is not None and taken.__qualname__ != entry.__qualname__:
                raise ValueError(f"{self.kind} {name} is already registered by {taken.__qualname__}")
            self._entries[name] = entry
            return entry

        return add

    def knows(self, entry: Any) -> bool:
        """Return whether the class *entry* is registered."""
        return any(known is entry for known in self._entries.values())

    def names(self) -> list[str]:
        return sorted(self._entries)

    def classes(self) -> dict[str, Any]:
        """Return the registered classes by class name, for the exports of a package."""
        return {entry.__name__: entry for entry in self._entries.values()}

    def get(self, name: str) -> Any:
        """Return the class registered as *name*.

        Raises:
            UsageError: *name* is unknown; the message has the nearest name and all names
        """
        if name not in self._entries:
            raise UsageError(
                f"unknown {self.kind} {name}{nearest(name, self._entries)}; choose from {', '.join(self.names())}"
            )
        return self._entries[name]

    def prefix(self, name: str) -> str:
        """Return the prefix of the flags of the method *name*."""
        return (self.get(name).flag_prefix or name).replace("-", "_")

    def options(self, flags: Any, name: str, side: str = "") -> dict[str, Any]:
        """Return the options of the method *name* set by *flags*: for both stacks, or only for the stack on *side*."""
        prefix, method = f"{side}_{self.prefix(name)}" if side else self.prefix(name), self.get(name)
        known = [option for option in inspect.signature(method.__init__).parameters if option not in _PLACES]
        values = {option: getattr(flags, f"{prefix}_{option}", None) for option in known}
        return {option: value for option, value in values.items() if value is not None}

    def choose(self, flags: Any, name: str, side: str) -> MethodConfig:
        """Return the method *name* for *side* with the options set by *flags*, including its inner method."""
        method, options = self.get(name), {**self.options(flags, name), **self.options(flags, name, side)}
        inner = method.inner_method(options)
        if inner is not None:
            options["inner"] = self.choose(flags, inner, side)
        return MethodConfig(name, method, options)

    def check(self, name: str) -> str:
        """Return *name* if it is registered; for the ``type=`` of a command line flag."""
        self.get(name)
        return name
