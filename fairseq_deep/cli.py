"""Entry point of ``fairseq-deep``, and the only module that knows all commands.

A command is a module with ``add_arguments(parser)``, ``run(args) -> int`` and ``EXAMPLE``, a command line for the help
text, which starts with the first line of the module's docstring. To add a command, write the module and list it in
`GROUPS`. Only the modules of the given command are imported.
"""

import argparse
import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from fairseq_deep import __version__
from fairseq_deep.errors import UsageError, nearest, one_line, printable

GROUPS = {
    "train": ("tools.archs", "tools.flags", "tools.diagnose", "tools.average", "recipes.commands.distill",
              "recipes.commands.recipe", "recipes.commands.compare", "tools.path"),
    "use": ("tools.translate", "tools.serve", "tools.score", "tools.package"),
    "convert": ("tools.export", "tools.import_"),
    "inspect": ("tools.check", "tools.report", "tools.plot", "tools.doctor"),
}  # fmt: skip
"""The modules of the commands, by what a person is doing."""
RAW = ("recipe", "compare")
"""Commands that parse their own arguments."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors without a file name that come from writing to standard output."""


def name_of(module: str) -> str:
    """Return the name of a command; a module has the suffix ``_`` if the name is a Python keyword."""
    return module.rpartition(".")[2].rstrip("_")


COMMANDS = {name_of(module): module for modules in GROUPS.values() for module in modules}


class _Parser(argparse.ArgumentParser):
    """Parser that reports an invalid argument on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message, None)} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print; unlike argparse, raise errors such as a full disk or a closed pipe."""
        if message:
            stream = sys.stderr if file is None else file
            with contextlib.suppress(OSError) if stream is sys.stderr else contextlib.nullcontext():
                stream.write(message)


def make_parser(
    only: str | None = None, whole: bool = False
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser and the parsers of its commands.

    Args:
        only: the only command to add; None: all, with their groups in the help text
        whole: include the arguments of `RAW`
    """
    parser = _Parser(prog="fairseq-deep", description="Tools for deep Transformers in fairseq.",
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fairseq_deep {__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="fairseq-deep COMMAND --help: its options")
    groups = []
    for group, modules in GROUPS.items():
        rows = []
        for name in map(name_of, modules):
            if only in (None, name):
                rows.append((name, _add_command(commands, name, whole)))
        groups.append(f"{group}:\n" + "".join(f"  {name:<11} {summary}\n" for name, summary in rows))
    parser.epilog = "\n".join(groups)
    return parser, commands.choices


def _add_command(commands: Any, name: str, whole: bool) -> str:
    """Add the parser of a command, and return its summary."""
    module = importlib.import_module(f"fairseq_deep.{COMMANDS[name]}")
    summary = module.__doc__.strip().splitlines()[0]
    listed = {"help": summary} if whole else {}  # shtab skips commands without it
    command = commands.add_parser(
        name, description=summary, epilog=f"example:\n  {module.EXAMPLE}", allow_abbrev=False, add_help=name not in RAW,
        formatter_class=argparse.RawDescriptionHelpFormatter, **listed,
    )  # fmt: skip
    if whole or name not in RAW:
        module.add_arguments(command)
    command.set_defaults(run=module.run)
    return summary


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands, for ``shtab``."""
    return make_parser(whole=True)[0]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of a command, with its function in `run`; exit if they are invalid."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv and argv[0] in COMMANDS else None
    if name in RAW:
        module = importlib.import_module(f"fairseq_deep.{COMMANDS[name]}")
        return argparse.Namespace(command=name, run=module.run, words=argv[1:])
    if argv and name is None and not argv[0].startswith("-"):
        _Parser(prog="fairseq-deep").error(f"unknown command '{argv[0]}'{nearest(argv[0], COMMANDS)}")
    parser, commands = make_parser(name)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if hasattr(args, "fairseq_flags"):  # the command passes unknown flags to fairseq
        args.fairseq_flags = unknown
    elif unknown:
        commands[args.command].error(f"unrecognised arguments: {' '.join(unknown)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fairseq-deep`` with `argv` (default: the process's arguments) and return its exit code."""
    name, advice = "fairseq-deep", ""
    try:
        open_streams()
        with ended_by_signals():
            try:
                args = parse(argv)
            except SystemExit:  # its help may not be flushed yet
                sys.stdout.flush()
                raise
            name = f"fairseq-deep {args.command}"
            advice = "; the same command resumes" if getattr(args, "resumes", False) else ""
            logging.getLogger("fairseq_deep").setLevel(logging.ERROR)  # models log messages about training
            code = args.run(args)
            sys.stdout.flush()
            return code
    except UsageError as error:
        return tell(f"{name}: {error.message}", error.status)
    except KeyboardInterrupt:
        return tell(f"{name}: interrupted{advice}", 130)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        _close_stdout()
        return 141
    except OSError as error:
        if error.filename is not None:
            return tell(f"{name}: cannot access {printable(error.filename, None)}: {error.strerror}", 2)
        if error.errno in UNWRITABLE:
            _close_stdout()
            return tell(f"{name}: cannot write to standard output: {error.strerror}", 2)
        return tell(f"{name}: {error.strerror or one_line(error)}", 2)


def open_streams() -> None:
    """Reopen closed standard streams; otherwise, another file could be opened with their numbers.

    Raises:
        UsageError: standard output is closed
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise UsageError("standard output is closed; redirect it to a file or to /dev/null")


class Ended(BaseException):
    """A signal that ends the command after temporary files are removed."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Remove temporary files on SIGTERM or SIGHUP, then let the signal end the process.

    A signal that the caller ignores, such as SIGHUP with nohup, remains ignored.
    """

    def end(number: int, _: Any) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the removal
        raise Ended(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    except Ended as ended:
        signal.signal(ended.args[0], signal.SIG_DFL)
        os.kill(os.getpid(), ended.args[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell(line: str, code: int) -> int:
    """Print `line` to stderr, if possible, and return `code`."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    return code


def _close_stdout() -> None:
    """Redirect standard output to /dev/null, to prevent another exception from the interpreter's flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
