"""Commands that end with one line, without a traceback, where an exception says what is wrong with the input."""

import functools
import sys


class OneLineError(Exception):
    """An ordinary exception whose message is one line. Any exception with an attribute `one_line` is treated alike."""

    @property
    def one_line(self):
        return str(self)


def printable(line):
    """`line` without what acts on a terminal: it may quote names from a stranger's checkpoint."""
    words = " ".join(line.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in words)


def command(main):
    """`main`, where an exception with `one_line` prints that line and exits with status 1."""

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
