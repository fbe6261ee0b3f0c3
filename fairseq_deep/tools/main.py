"""Entry point of ``fairseq-deep``.

A sub-command is a module with ``add_arguments(parser)`` and ``run(args) -> int``; the first line of its docstring is
its help. To add one, write the module and list it in `COMMANDS`.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Optional

from fairseq_deep.tools import (
    UserError,
    archs,
    average,
    check,
    diagnose,
    doctor,
    export,
    flags,
    package,
    path,
    plot,
    report,
    score,
    translate,
    wheelhouse,
)

COMMANDS = (path, archs, flags, doctor, check, average, score, diagnose, translate, package, plot, report, export,
            wheelhouse)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the arguments of the sub-command that `argv` names; `run` is its function. Exits if they are wrong."""
    parser = _Parser(prog="fairseq-deep", description="Tools for deep Transformers in fairseq.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary = module.__doc__.strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if hasattr(args, "fairseq_flags"):  # the sub-command hands to fairseq what it does not know itself
        args.fairseq_flags = unknown
    elif unknown:
        commands.choices[args.command].error(f"unrecognised arguments: {' '.join(unknown)}")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``fairseq-deep`` with `argv` (default: those of the process) and return its exit code."""
    args = parse(argv)
    logging.getLogger("fairseq_deep").setLevel(logging.ERROR)  # what models tell while they are built is for training
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"fairseq-deep {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fairseq-deep {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left; what the interpreter flushes at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
