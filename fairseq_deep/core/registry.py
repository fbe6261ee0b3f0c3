"""Registries of the methods of each design axis.

A registry maps the value of a command line flag (``--layer-agg dlcl``) to a class. Each method registers itself in its
own file, so adding a method changes no existing file.
"""

import argparse
import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from fairseq_deep.errors import UsageError, nearest, one_line

from .fields import Option, add_flag, check_fields
from .stack import MethodConfig, Stack, options_of

__all__ = ["Method", "Registry", "UsageError", "load_plugins", "nearest"]

logger = logging.getLogger(__name__)

PLUGINS: dict[str, str] = {}
"""Installed packages with methods, as "module (entry point)", and why they could not be imported ("" if they were)."""


def load_plugins() -> None:
    """Import the modules that installed packages name as entry points of the group ``fairseq_deep.plugins``.

    The modules register methods. An error is logged, so the other methods still work.
    """
    for entry in entry_points(group="fairseq_deep.plugins"):
        name = f"{entry.value} ({entry.name})"
        try:
            entry.load()
            PLUGINS[name] = ""
        except Exception as error:  # a foreign module can raise any exception
            PLUGINS[name] = one_line(error)
            known = isinstance(error, UsageError)
            logger.error("cannot import the plugin %s: %s; correct or uninstall it", name, PLUGINS[name],
                         exc_info=None if known else error)  # fmt: skip


class Method:
    """Base class of the methods of all axes: flags, and properties that are known before a method is built.

    A method is built from the description of its stack and its own options. Each option has a command line flag
    ``--PREFIX-OPTION`` (PREFIX: *flag_prefix*, by default the registered name), which sets the constructor's argument
    OPTION. ``--encoder-PREFIX-OPTION`` and ``--decoder-PREFIX-OPTION`` override it for one stack.

    Attributes:
        options: the options by name; their types and defaults are those of the constructor's arguments
        flag_prefix: the PREFIX of its flags if it differs from the name, or several methods share flags
        prefix: the PREFIX, set by the registry
        decoder_options: options that only apply to decoders
        paper: first author and year of the paper, for lists; "" if there is none
        architectures: named architectures of base size with the method, {name after "transformer_": (norm, (encoder
            layers, decoder layers), further flags)}; norm: "pre", "post", or "-" if the method has its own norms
    """

    options: dict[str, Option] = {}
    flag_prefix = prefix = ""
    decoder_options: tuple[str, ...] = ()
    paper = ""
    architectures: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {}

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Check the options, also without flags."""
        with contextlib.suppress(TypeError):  # of arguments that the constructor rejects
            given = inspect.signature(cls.__init__).bind_partial(None, *args, **options).arguments
            MethodConfig(cls.prefix, cls, {name: given[name] for name in options_of(cls) if name in given})
        return super().__new__(cls)

    @classmethod
    def add_args(cls, parser) -> None:
        """Add the method's flags, without defaults: an architecture can then set them."""
        defaults = inspect.signature(cls.__init__).parameters
        for name, option in cls.options.items():
            flag = f"{cls.prefix}_{name}"
            add_flag(parser, flag, option, cls.__init__, name, defaults[name].default)
            for side in ("encoder", "decoder") if option.per_stack else ():
                own = Option(f"the same for the {side} only (default: --{flag.replace('_', '-')})")
                add_flag(parser, f"{side}_{flag}", own, cls.__init__, name)

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


def flags_owner(method: Any) -> Any:
    """Return the class that declares the flags of *method*: itself or a base class."""
    return next(kind for kind in method.__mro__ if {"options", "add_args"} & vars(kind).keys())


class Registry:
    """Dictionary of named classes, filled by a decorator, with helpful errors.

    Args:
        kind: the flag that chooses an entry ("--layer-agg")

    Attributes:
        taken: returns the destinations of flags that a new method cannot have; the plugin sets it, for methods that
            are registered after the package is imported
    """

    taken: Callable[[], Iterable[str]] = staticmethod(tuple)

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable:
        """Return a class decorator that registers a class as *name*.

        Raises:
            ValueError: another class has this *name*
            UsageError: the class is no method, or one of its flags exists already, or cannot be one
        """
        if not re.fullmatch("[a-z][a-z0-9-]*", name):
            raise UsageError(f"{self.kind} {name!r}: use lower-case letters, digits and hyphens as a name")

        def add(entry):
            if not (isinstance(entry, type) and issubclass(entry, Method)):
                raise UsageError(f"{self.kind} {name}: {entry!r} is not a subclass of the base class of its axis")
            owner = flags_owner(entry)
            entry.prefix = entry.flag_prefix or (owner.prefix if owner is not entry else "") or name
            taken = self._entries.get(name)
            if taken is not None and taken.__qualname__ != entry.__qualname__:
                raise ValueError(f"{self.kind} {name} is already registered by {taken.__qualname__}")
            if taken is None:
                self._check_flags(name, entry)
            self._entries[name] = entry
            return entry

        return add

    def _check_flags(self, name: str, entry: Any) -> None:
        """Reject flags of *entry* that already exist, and options that are none of its arguments.

        Subclasses of a method may share its flags.
        """
        if any(flags_owner(other) is flags_owner(entry) for other in self._entries.values()):
            return
        parser = argparse.ArgumentParser(add_help=False)
        try:
            entry.add_args(parser)
            parser.format_help()
        except (argparse.ArgumentError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.kind} {name}: its flags are not valid ({one_line(error)}); each of the options of "
                f"{entry.__qualname__} must be an argument of its constructor, with %% for % in help"
            ) from error
        taken = set(self.taken()) if parser._actions else ()
        for action in parser._actions:
            flag = max(action.option_strings, key=len, default=action.dest)
            if not {action.dest, flag[2:].replace("-", "_")}.isdisjoint(taken):
                raise UsageError(
                    f"{self.kind} {name}: {flag} is already a flag of fairseq or of another method; rename the option, "
                    f"or set flag_prefix of {entry.__qualname__}"
                )

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
                f"unknown {self.kind} {name}{nearest(name, self._entries)}; choose from {', '.join(self.names())}, "
                "or install the plugin that has it"
            )
        return self._entries[name]

    def prefix(self, name: str) -> str:
        """Return the prefix of the flags of the method *name*."""
        return self.get(name).prefix.replace("-", "_")

    def options(self, flags: Any, name: str, side: str = "") -> dict[str, Any]:
        """Return the options of the method *name* set by *flags*: for both stacks, or only for the stack on *side*."""
        prefix, method = f"{side}_{self.prefix(name)}" if side else self.prefix(name), self.get(name)
        values = {option: getattr(flags, f"{prefix}_{option}", None) for option in options_of(method)}
        return {option: value for option, value in values.items() if value is not None}

    def choose(self, flags: Any, name: str, side: str) -> MethodConfig:
        """Return the method *name* for *side* with the options set by *flags*, including its inner method."""
        method, own = self.get(name), self.options(flags, name, side)
        start, rules = f"{side}_{method.prefix}", {option: declared.rule for option, declared in method.options.items()}
        check_fields(own, method.__init__, rules, lambda option: f"--{start}_{option}".replace("_", "-"))
        options = {**self.options(flags, name), **own}
        chosen = MethodConfig(name, method, options)
        inner = method.inner_method(options)
        return chosen if inner is None else chosen.with_inner(self.choose(flags, inner, side))

    def check(self, name: str) -> str:
        """Return *name* if it is registered; for the ``type=`` of a command line flag."""
        self.get(name)
        return name
