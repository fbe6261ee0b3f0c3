"""print a script for tab completion in bash, zsh or tcsh"""

from __future__ import annotations

import argparse

import fairseq_deep
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.options import SWITCH
from fairseq_deep.recipes.recipe import Recipe

FOLDERS = ("DIR", "DATA_BIN")
FILES = ("FILE", "FILE|DIR", "LOG", "MODEL", "OUT", "PATH", "RUN", "RUN|FILE")
"""Metavariables of arguments that are paths."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    text = "shell; for bash, the script also completes the options of run_wmt16_ende.sh"
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help=text)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError(f"tab completion requires shtab ({error}): pip install shtab") from error
    from fairseq_deep.tools.main import make_parser  # imports this module

    parsers = [make_parser(all_arguments=True)[0]]
    parsers += [Recipe().parser("run_wmt16_ende.sh")] if args.shell == "bash" else []
    for parser in parsers:
        complete_values(parser, {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}, known_names())
        print(shtab.complete(parser, args.shell))
    return 0


def known_names() -> dict[str, list[str]]:
    """Return the values of arguments that are names, by metavariable or option; without fairseq, no architectures."""
    try:
        archs = fairseq_deep.list_archs()
    except ImportError:
        archs = []
    names = {**dict.fromkeys(("--arch", "PATTERN", "SYSTEM"), archs),
             SWITCH.metavar: ["true", "false"]}  # fmt: skip
    return {name: values for name, values in names.items() if values}


def complete_values(parser: argparse.ArgumentParser, paths: dict[str, object], names: dict[str, list[str]]) -> None:
    """Let the arguments of *parser* and its sub-commands complete paths and names."""
    for action in parser._actions:
        key = next((each for each in (*action.option_strings, action.metavar) if each in names), None)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_values(command, paths, names)
        elif key:
            action.choices = names[key]
        elif action.metavar in FOLDERS + FILES:
            action.complete = paths["DIR" if action.metavar in FOLDERS else "FILE"]
