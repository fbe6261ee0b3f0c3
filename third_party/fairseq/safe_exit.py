"""One-line errors of commands, without a traceback, for mistakes in the input."""

import argparse
import functools
import os
import re
import sys
import traceback

ROOTS = ("fairseq", "fairseq_cli")
COMPUTING = ("models", "modules")
"""Packages of fairseq whose checks can also find programming errors, such as wrong shapes."""
CHECKS = (AssertionError, ValueError, NotImplementedError, RuntimeError, FileNotFoundError)
"""Exceptions that fairseq raises for settings and data that it does not accept."""
HINTS = {"Dataset not found": "; correct the split, the languages or --dataset-impl",
         "Model file not found": "; correct the path"}  # fmt: skip
MISSING = re.compile(r"assert (?:args|cfg|self\.args|self\.cfg)\.(\w+)(?: is not None)?$")
UNREADABLE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class OneLineError(Exception):
    """An exception with a message of one line. Commands treat any exception with an attribute `one_line` alike."""

    @property
    def one_line(self):
        return str(self)


def printable(line):
    """Return `line` without control characters: it may quote names in an untrusted checkpoint."""
    words = " ".join(line.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in words)


def line_of(error):
    """Return the line that explains `error`, or None if its traceback is needed, as for a programming error."""
    line = getattr(error, "one_line", None)
    if line is not None:
        return line
    if isinstance(error, argparse.ArgumentError):
        return f"this --task, --arch or another component has a flag that another one has, too ({error}); use others"
    if isinstance(error, UNREADABLE) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; correct the path"
    flag = MISSING.match(last_line(error)) if isinstance(error, AssertionError) and not str(error) else None
    if flag:
        return f"--{flag[1].replace('_', '-')} is required; add it"
    # with another context, the message hides the cause
    plain = type(error) is Exception and isinstance(error.__context__, (type(None), UnicodeError))
    own = type(error) is OSError and error.errno is None  # not of the system
    if not (plain or own or isinstance(error, CHECKS)) or not is_check(error):
        return None
    return f"{error}{next((hint for start, hint in HINTS.items() if start in str(error)), '')}"


def last_line(error):
    """Return the line of code that raised `error`; empty if it is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].line or "" if frames else ""


def is_check(error):
    """Return whether a `raise` or `assert` with a message in fairseq, outside of its models, raised `error`.

    In its models, the message must name an option.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not str(error).strip():
        return False
    parts = os.path.normpath(frames[-1].filename).split(os.sep)
    root = next((index for index, part in enumerate(parts) if part in ROOTS), None)
    if root is None or not (isinstance(error, AssertionError) or (frames[-1].line or "").startswith("raise")):
        return False
    return "--" in str(error) or parts[root + 1] not in COMPUTING


def command(main):
    """Decorate `main`: an exception with a line (`line_of`) prints that line and exits with status 1."""

    @functools.wraps(main)
    def run(*args, **options):
        try:
            return main(*args, **options)
        except Exception as error:
            line = line_of(error)
            if line is None:
                raise
            sys.exit(printable(line))

    return run
