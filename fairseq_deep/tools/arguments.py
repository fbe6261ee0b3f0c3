"""Types of arguments."""

import argparse
import math
from collections.abc import Callable
from typing import Any


def argument(
    expected: str, convert: Callable[[str], Any], holds: Callable[[Any], Any] = lambda value: True
) -> Callable[[str], Any]:
    """Return the type of an argument.

    Args:
        expected: the values, for messages
        convert: returns the value of a text, or raises `ValueError`
        holds: whether a value is valid
    """

    def parse(text: str) -> Any:
        try:
            value = convert(text)
            valid = holds(value)
        except ValueError:
            valid = False
        if not valid:
            raise argparse.ArgumentTypeError(f"must be {expected}, not '{text}'")
        return value

    return parse


def digits(text: str) -> int:
    """Return the whole number *text*, which has only digits."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


at_least_one = argument("a whole number of at least 1", digits, lambda value: value > 0)
at_least_zero = argument("a number of at least 0", float, lambda value: 0 <= value < math.inf)
