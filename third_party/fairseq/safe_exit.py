"""One-line errors of commands, without a traceback, for mistakes in the input."""

import functools
import sys


class OneLineError(Exception):
    """An exception with a message of one line. Commands treat any exception with an attribute `one_line` alike."""

    @property
    def one_line(self):
        return str(self)


def printable(line):
    """Return `line` without control characters: it may quote names in an untrusted checkpoint."""
    words = " ".join(line.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in words)


def command(main):
    """Decorate `main`: an exception with `one_line` prints that line and exits with status 1."""

    @functools.wraps(main)
    def run(*args, **options):
        try:
            return main(*args, **options)
        except Exception as error:
            line = getattr(error, "one_line", None)
            if line is None:
                raise
            sys.exit(printable(line))

    return run
