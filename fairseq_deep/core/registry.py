"""Named choices of one design axis.

A registry maps the value of a command line flag (``--layer-agg dlcl``) to the class behind it.
Each method registers itself where it is defined, so adding a method changes no existing file.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from fairseq_deep.errors import UsageError

from .stack import MethodConfig, Stack


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """" (did you mean X?)" for the closest of *names*, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


class Method:
    """What methods of all axes have: flags, and what they say of themselves before they are built.

    A method is built from the description of its stack and its own options. A command line flag ``--PREFIX-OPTION``
    (PREFIX: *flag_prefix*, or else the registered name) sets the constructor's argument OPTION. Where a method adds
    ``--encoder-PREFIX-OPTION`` or ``--decoder-PREFIX-OPTION``, that flag overrides it for one stack.

    Attributes:
        flag_prefix: the PREFIX of its flags where it is not the name, or several methods share them
        decoder_options: those that are about decoders
        paper: whose method it is, with the year, for lists; "" if nobody's
    """

    flag_prefix = ""
    decoder_options: tuple[str, ...] = ()
    paper = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept the names of the last release with a warning, and provide both names."""
        super().__init_subclass__(**options)
        for old, new in (("point", "next_input"), ("around", "inner_method"), ("idle_flags", "unused_flags")):
            if new in vars(cls):
                setattr(cls, old, vars(cls)[new])
            elif old in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is now called {new}", FutureWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    @staticmethod
    def add_args(parser) -> None:
        """Add the method's flags, without defaults: an architecture's preset must be able to set them."""

    @classmethod
    def inner_method(cls, options: dict[str, Any]) -> str | None:
        """The name of the method of the same axis that this one is built around; it gets it as *inner*."""
        return None

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        """Refuse what the method cannot do.

        Args:
            stack: the stack that it was chosen for
            other: the other stack
            options: its own

        Raises:
            UsageError: one line with the flags and the cure
        """


# arguments of methods that are no options: what they are built for
_PLACES = ("self", "stack", "number", "encoder", "decoder", "inner")


class Registry:
    """A dictionary of named classes with a decorator to fill it and errors that help.

    Args:
        kind: what the entries are, as the flag calls it ("--layer-agg")
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Any] = {}

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

    def knows(self, entry: Any) -> bool:
        """Whether the class *entry* is one of the registered."""
        return any(known is entry for known in self._entries.values())

    def names(self) -> list[str]:
        return sorted(self._entries)

    def classes(self) -> dict[str, Any]:
        """The registered classes by their own names, which a package exports."""
        return {entry.__name__: entry for entry in self._entries.values()}

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

    def prefix(self, name: str) -> str:
        """What the flags of the method *name* begin with."""
        return (self.get(name).flag_prefix or name).replace("-", "_")

    def options(self, flags: Any, name: str, side: str = "") -> dict[str, Any]:
        """The options of the method *name* that *flags* have set: for both stacks, or for the one on *side* only."""
        prefix, method = f"{side}_{self.prefix(name)}" if side else self.prefix(name), self.get(name)
        known = [option for option in inspect.signature(method.__init__).parameters if option not in _PLACES]
        values = {option: getattr(flags, f"{prefix}_{option}", None) for option in known}
        return {option: value for option, value in values.items() if value is not None}

    def choose(self, flags: Any, name: str, side: str) -> MethodConfig:
        """The method *name* with the options that *flags* have set for *side*, and the one that it is built around."""
        method, options = self.get(name), {**self.options(flags, name), **self.options(flags, name, side)}
        inner = method.inner_method(options)
        if inner is not None:
            options["inner"] = self.choose(flags, inner, side)
        return MethodConfig(name, method, options)

    def check(self, name: str) -> str:
        """*name* itself if it is registered: the ``type=`` of a command line flag."""
        self.get(name)
        return name
