"""Checks of Python arguments: types by their annotations, ranges and names by one table per class."""

from __future__ import annotations

import functools
import math
import numbers
import typing
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any, NamedTuple

from fairseq_deep.errors import UsageError, nearest, printable


class Range(NamedTuple):
    """Range of a number, including both ends, unless the number must be *above* or *below* them."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Return whether *value* is in the range."""
        is_end = self.above and value == self.least or self.below and value == self.most
        return self.least <= value <= self.most and not is_end

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"above {self.least}" if self.above else f"of at least {self.least}"
        if self.least == -math.inf:
            return f"of at most {self.most}"
        return f"{'above' if self.above else 'from'} {self.least} to {'below ' * self.below}{self.most}"


PROBABILITY = Range(0, 1, below=True)


class Option(NamedTuple):
    """An option of a method, or of layers.

    Attributes:
        help: text of its flag, without choices and default
        rule: the range of a number, or the accepted strings
        per_stack: it also has a flag for each stack
        needs: another option and its values with which this one has an effect
    """

    help: str
    rule: Range | Collection[str] | None = None
    per_stack: bool = False
    needs: tuple[str, tuple[Any, ...]] | None = None


hints_of = functools.cache(typing.get_type_hints)
"""Returns the annotations of a class or function."""
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: _KINDS[int][1](value) or isinstance(value, numbers.Real) and math.isfinite(value)
            and not isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
}  # fmt: skip


def check_fields(
    values: Mapping[str, Any],
    owner: Any,
    rules: Mapping[str, Range | Collection[str] | None],
    label: Callable[[str], str] = str,
) -> None:
    """Reject values of a wrong type, outside their range, and unknown names.

    Args:
        values: the arguments by name
        owner: the class or function whose annotations have the types
        rules: the range of a number, or the accepted strings
        label: returns the name of an argument in messages, for example its flag

    Raises:
        UsageError: the message names the argument, and for an unknown name the nearest one
    """
    for name, value in values.items():
        kinds = typing.get_args(hints_of(owner).get(name)) or (hints_of(owner).get(name),)
        rule = rules.get(name)
        if value is None and NoneType in kinds:
            continue
        if isinstance(rule, Collection) and not isinstance(rule, Range):
            if not isinstance(value, str) or value not in rule:
                raise UsageError(f"unknown {label(name)} {printable(value)}{nearest(str(value), rule, 0.6)}; "
                                 f"choose from {', '.join(rule)}")  # fmt: skip
            continue
        known = [_KINDS[kind] for kind in kinds if kind in _KINDS]
        holds = not known or any(fits(value) for _, fits in known)
        if not holds or isinstance(rule, Range) and not rule.holds(value):
            expected = " or ".join(text for text, _ in known) + (f" {rule}" if rule else "")
            raise UsageError(f"{label(name)} must be {expected} ({printable(repr(value))}): change it")


def add_flag(parser: Any, flag: str, option: Option, owner: Any, name: str, default: Any = None) -> None:
    """Add ``--FLAG`` for the argument *name* of *owner*, with the type of its annotation, and without a default.

    Args:
        default: the default of the argument, for the help text
    """
    hint = hints_of(owner).get(name)
    kinds = typing.get_args(hint) or (hint,)
    kind = next((kind for kind in (str, bool, int, float) if kind in kinds), str)
    names = "" if option.rule is None or isinstance(option.rule, Range) else f": {', '.join(option.rule)}"
    settings: dict[str, Any] = {"help": option.help + names}
    if default not in (None, False):
        settings["help"] += f" (default: {default})"
    if kind is bool:
        settings["action"] = "store_true"
    else:
        settings.update(type=kind, metavar={str: "NAME", int: "N", float: "X"}[kind])
    parser.add_argument(f"--{flag.replace('_', '-')}", **settings)
