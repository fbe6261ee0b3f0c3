"""Declarations of a recipe's options, for the command line, ``--help`` and conf files.

A conf file has one option per line, of the recipe or of fairseq-train. A flag on the command line overrides conf
files, and later conf files override earlier ones.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shlex
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from fairseq_deep.core.registry import nearest
from fairseq_deep.errors import UsageError
from fairseq_deep.tools.input_text import read_lines

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLES = os.path.join(ROOT, "examples")


class Kind(NamedTuple):
    """The type of an option: a pattern for its values, a description, and metadata for ``--help``."""

    pattern: str
    words: str
    convert: Any = str
    metavar: str | None = "TEXT"
    choices: tuple[str, ...] | None = None

    def read(self, flag: str, text: str) -> Any:
        """Convert *text* to a value.

        Raises:
            UsageError: *text* is not valid for this kind
        """
        if not re.fullmatch(self.pattern, text):
            raise UsageError(f"{flag} must be {self.words}, not '{text}'")
        return self.convert(text)


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


TEXT = Kind("(?s).*", "a text")
FILE, FOLDER = TEXT._replace(metavar="FILE"), TEXT._replace(metavar="DIR")
WHOLE = Kind("0|[1-9][0-9]*", "a whole number", int, "N")
COUNT = Kind("[1-9][0-9]*", "a whole number of at least 1", int, "N")
NUMBER = Kind(r"[0-9]+(\.[0-9]+)?", "a number", metavar="X")  # kept as text, which is passed to fairseq's commands
SWITCH = Kind("true|false", "true or false", "true".__eq__, "true|false")
AUTO = Kind("auto|0|[1-9][0-9]*", "a whole number or auto", _number_or_auto, "N")
AUTO_COUNT = Kind("auto|[1-9][0-9]*", "a number of at least 1, or auto", _number_or_auto, "N")
SUBSETS = Kind("none|(valid,)?test(,test[1-9][0-9]*)*", "none, or a list such as test; valid,test; test,test1,test2")


def one_of(*choices: str) -> Kind:
    """Return the kind of an option with the values *choices*."""
    return Kind("|".join(choices), ", ".join(choices), metavar=None, choices=choices)


def option(default: Any, kind: Kind, text: str = "") -> Any:
    """Declare an option; an empty *text* hides it in ``--help``."""
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass
class Options:
    """Options with their values; subclasses declare them as fields.

    Attributes:
        help: whether the command line has ``--help``
        given: names of the options on the command line
        extra: flags of fairseq-train, after ``--``
        arguments: positional arguments
        conf_flags: {flag of fairseq-train in conf files: its value}
    """

    def __post_init__(self) -> None:
        self.help = False
        self.given: set[str] = set()
        self.extra: list[str] = []
        self.arguments: list[str] = []
        self.conf_flags: dict[str, str] = {}

    argument_name = argument_help = ""  # of positional arguments, if supported; not fields

    @classmethod
    def declared(cls) -> dict[str, Any]:
        """Return the fields by name."""
        return {each.name: each for each in fields(cls)}

    def set(self, name: str, text: str) -> None:
        """Set an option.

        Raises:
            UsageError: *text* is not a valid value
        """
        setattr(self, name, self.declared()[name].metadata["kind"].read(flag_of(name), text))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options, with their current values in the help."""
        if self.argument_name:
            parser.add_argument("arguments", nargs="*", metavar=self.argument_name, help=self.argument_help)
        group = parser.add_argument_group("options, with their current values")
        group.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        for name, declared in self.declared().items():
            kind, text, value = declared.metadata["kind"], declared.metadata["help"], getattr(self, name)
            shown = "none" if value == "" else str(value).lower() if isinstance(value, bool) else value
            group.add_argument(
                flag_of(name), type=partial(kind.read, flag_of(name)), choices=kind.choices,
                metavar=kind.metavar, default=argparse.SUPPRESS,
                help=f"{text} [{shown}]".replace("%", "%%") if text else argparse.SUPPRESS,
                **({"nargs": "?", "const": True} if kind is SWITCH else {}),
            )  # fmt: skip

    def parser(self, program: str = "") -> argparse.ArgumentParser:
        """Return the parser of the options before ``--``; its help shows the current values."""
        arguments = f" {self.argument_name}..." if self.argument_name else ""
        parser = argparse.ArgumentParser(
            program, f"{program} [options]{arguments} [-- flags for fairseq-train]", add_help=False,
            allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=30),
        )  # fmt: skip
        self.add_arguments(parser)
        return parser

    def parse(self, words: list[str], by_user: bool = True) -> Options:
        """Parse the command line *words* and return these options.

        Raises:
            UsageError: an option is unknown, has no value or an invalid one
        """
        end = words.index("--") if "--" in words else len(words)
        words, self.extra = words[:end], [*self.extra, *words[end + 1 :]]
        if self.argument_name:  # argparse would parse a positional argument after a switch as its value
            switches = [flag_of(name) for name, each in self.declared().items() if each.metadata["kind"] is SWITCH]
            words = [
                f"{word}=true" if word in switches and following not in ("true", "false") else word
                for word, following in zip(words, [*words[1:], ""])
            ]
        try:
            found, unknown = self.parser().parse_known_intermixed_args(words)
        except argparse.ArgumentError as error:
            raise UsageError(str(error)) from error
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("--"):
                raise UsageError(f"unexpected argument '{unknown[0]}': options start with --")
            described = (flag_of(name) for name, each in self.declared().items() if each.metadata["help"])
            raise UsageError(
                f"unknown option '{flag}'{nearest(flag, described, cutoff=0.8)}: --help lists the options; flags of "
                "fairseq-train, such as --max-update, go after --"
            )
        for name, value in vars(found).items():
            setattr(self, name, value)
        if by_user:
            self.given |= vars(found).keys()
        return self


def flag_of(name: str) -> str:
    """Return the flag of an option: --max-tokens for max_tokens."""
    return f"--{name.replace('_', '-')}"


def quote(words: Any) -> str:
    """Return *words* as a shell command."""
    return shlex.join(map(str, words))


# flags that the recipe itself passes to fairseq-train
MANAGED = ("save_dir", "user_dir", "log_format", "cpu", "fp16", "bf16", "amp", "distributed_world_size",
           "distributed_backend")  # fmt: skip


def check_extra_flags(options: Options) -> None:
    """Reject flags after ``--`` that the recipe passes itself."""
    for word in options.extra:
        flag = word.partition("=")[0]
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--"):
            continue
        if name in options.declared():
            raise UsageError(f"{flag} is an option of this script: give it before --")
        if name in ("share_all_embeddings", "share_decoder_input_output_embed"):
            raise UsageError(f"{flag} is set by this script: see --embeddings")
        if name in MANAGED:
            raise UsageError(f"{flag} is set by this script: see --exp, --precision, --ngpu and --nnodes")


def find_conf(name: str, task: str, beside: str = "") -> str:
    """Return the path of a conf file by its name, ``EXAMPLE/NAME`` or path; ``beside`` is searched first."""
    folders = [*filter(None, [beside]), os.path.join(EXAMPLES, task, "conf"), os.path.join(EXAMPLES, "demo")]
    paths = [os.path.join(folder, f"{name}.args") for folder in folders]
    if "/" in name:
        example, _, rest = name.partition("/")
        paths += [name, os.path.join(EXAMPLES, example, "conf", f"{rest}.args")]
    for path in filter(os.path.isfile, paths):
        return path
    found = (sorted(glob.glob(os.path.join(glob.escape(folder), "*.args"))) for folder in folders)
    known = [os.path.basename(path)[: -len(".args")] for each in found for path in each]
    hint = nearest(name, known)
    raise UsageError(f"unknown --conf '{name}'{hint} (known: {' '.join(known)}; or the path of a file)")


def load_conf(options: Any, names: str, beside: str = "", open_files: tuple[str, ...] = ()) -> None:
    """Read the conf files *names*, separated by commas, into *options*.

    Raises:
        UsageError: a file is unknown or includes itself, or a line is not an option
    """
    for name in filter(None, names.split(",")):
        path = os.path.realpath(find_conf(name, options.task, beside))
        if path in open_files:
            raise UsageError(f"{path} includes itself (--conf): remove the line")
        lines = [line.strip() for line in read_lines(path, may_be_empty=True)]
        for line in lines:
            if line and not line.startswith("#"):
                _read_line(options, path, line, lines, (*open_files, path))


def _read_line(options: Any, path: str, line: str, lines: list[str], open_files: tuple[str, ...]) -> None:
    flag, _, value = line.partition(" ")
    value = value.strip()
    if not flag.startswith("--"):
        raise UsageError(f"{path}: '{line}' is not an option: a line must be '--name value'")
    name = flag[2:].replace("-", "_")
    if name == "conf":
        load_conf(options, value, os.path.dirname(path), open_files)
    elif name in options.declared():
        if name not in options.given:
            options.set(name, value or "true")
    elif flag != "--deep-init" or "arch" not in options.given or f"--arch {options.arch}" in lines:
        options.conf_flags[flag] = value  # a job's --deep-init applies only to the job's architecture
