"""The options of a recipe: one declaration each, from which the command line, ``--help`` and conf files come.

A conf file has one option per line, of the recipe or of fairseq-train. A flag on the command line overrides conf
files, and later conf files override earlier ones.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fairseq_deep.core.registry import nearest
from fairseq_deep.errors import UsageError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLES = os.path.join(ROOT, "examples")


class Kind(NamedTuple):
    """The values of an option: a pattern, its description, and the type of a matching text."""

    pattern: str
    words: str
    convert: Any = str


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


TEXT = Kind("(?s).*", "a text")
WHOLE = Kind("0|[1-9][0-9]*", "a whole number", int)
COUNT = Kind("[1-9][0-9]*", "a whole number from 1 on", int)
NUMBER = Kind(r"[0-9]+(\.[0-9]+)?", "a number")  # stays a text, as fairseq's commands get it
SWITCH = Kind("true|false", "true or false", "true".__eq__)
AUTO = Kind("auto|0|[1-9][0-9]*", "a whole number or auto", _number_or_auto)
AUTO_COUNT = Kind("auto|[1-9][0-9]*", "a number from 1 on, or auto", _number_or_auto)
SUBSETS = Kind(
    "none|(valid,)?test(,test[1-9][0-9]*)*", "none, or test with valid before it and test1, test2 ... behind it"
)


def one_of(*choices: str) -> Kind:
    """The kind of an option with these values."""
    return Kind("|".join(choices), ", ".join(choices))


def option(default: Any, kind: Kind, text: str = "") -> Any:
    """Declare an option; an empty *text* keeps it out of ``--help``."""
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass
class Options:
    """Options with their values. Subclasses declare them as fields.

    Attributes:
        given: names of the options on the command line
        extra: what follows a lone ``--``: flags of fairseq-train
        arguments: words that are not options
        conf_flags: flags of fairseq-train in conf files, and their values
    """

    def __post_init__(self):
        self.given: set[str] = set()
        self.extra: list[str] = []
        self.arguments: list[str] = []
        self.conf_flags: dict[str, str] = {}

    argument_name = ""  # not a field: how --help names the arguments; without it there are none

    @classmethod
    def declared(cls) -> dict[str, Any]:
        """The fields by name."""
        return {each.name: each for each in fields(cls)}

    def set(self, name: str, text: str) -> None:
        """Set an option.

        Raises:
            UsageError: *text* is not one of its values
        """
        kind = self.declared()[name].metadata["kind"]
        check_value(flag_of(name), text, kind)
        setattr(self, name, kind.convert(text))

    def parse(self, words: list[str], by_user: bool = True) -> Options:
        """Read the command line *words*; return these options.

        Raises:
            UsageError: an option is unknown, lacks its value or has a wrong one
        """
        words, known = list(words), self.declared()
        while words:
            word = words.pop(0)
            if word == "--":
                self.extra += words
                break
            if self.argument_name and word and not word.startswith("-"):
                self.arguments.append(word)
                continue
            flag, equals, value = ("--help" if word == "-h" else word).partition("=")
            if not flag.startswith("--"):
                raise UsageError(f"unexpected argument '{word}': options start with --")
            name = flag[2:].replace("-", "_")
            if name not in known:
                raise UsageError(
                    f"unknown option '{flag}'{nearest(flag, map(flag_of, known))} (--help lists them; flags of "
                    "fairseq-train go after a lone --)"
                )
            if not equals:
                value = self._value_of(known[name], flag, words)
            before = getattr(self, name)
            self.set(name, value)
            if name in self.given and getattr(self, name) != before:
                raise UsageError(f"{flag} is given twice, as {before} and as {getattr(self, name)}: omit one of them")
            if by_user:
                self.given.add(name)
        return self

    def _value_of(self, declared: Any, flag: str, words: list[str]) -> str:
        """The value behind *flag*; a switch needs none."""
        following = words[0] if words else ""
        if declared.metadata["kind"] is SWITCH:
            is_word = self.argument_name and following not in ("true", "false")
            if not following or following.startswith("-") or is_word:
                return "true"
        if not words or following.startswith("--"):
            raise UsageError(f"{flag} needs a value")
        return words.pop(0)

    def usage(self, program: str) -> str:
        """The text of ``--help``, with the present values."""
        name = f" {self.argument_name}" if self.argument_name else ""
        lines = [f"usage: {program} [options]{name} [-- flags for fairseq-train]", "",
                 "options, with their present values:"]  # fmt: skip
        for each in self.declared().values():
            if each.metadata["help"]:
                value = False if each.name == "help" else getattr(self, each.name)
                shown = str(value).lower() if isinstance(value, bool) else value
                lines.append(f"  {flag_of(each.name):19} {each.metadata['help']} [{'none' if shown == '' else shown}]")
        return "\n".join(lines)


def flag_of(name: str) -> str:
    """The flag of an option: max_tokens is --max-tokens."""
    return f"--{name.replace('_', '-')}"


def check_value(flag: str, text: str, kind: Kind) -> None:
    """Reject a *text* that is not of *kind*."""
    if not re.fullmatch(kind.pattern, text):
        raise UsageError(f"{flag} takes {kind.words}, not '{text}'")


def quote(words: Any) -> str:
    """*words* as a line for a shell."""
    return shlex.join(map(str, words))


# flags that the recipe itself passes to fairseq-train
MANAGED = ("save_dir", "user_dir", "log_format", "cpu", "fp16", "bf16", "amp", "distributed_world_size",
           "distributed_backend")  # fmt: skip


def check_extra_flags(options: Options) -> None:
    """Reject flags behind a lone ``--`` that the recipe passes itself."""
    for word in options.extra:
        flag = word.partition("=")[0]
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--"):
            continue
        if name in options.declared():
            raise UsageError(f"{flag} is an option of this script: give it before the lone --")
        if name in ("share_all_embeddings", "share_decoder_input_output_embed"):
            raise UsageError(f"{flag} is set by this script: see --embeddings")
        if name in MANAGED:
            raise UsageError(f"{flag} is set by this script: see --exp, --precision, --ngpu and --nnodes")


def find_conf(name: str, task: str, beside: str = "") -> str:
    """The path of a conf file, by its name, ``EXAMPLE/NAME`` or its path; first looked for in the folder *beside*."""
    known = []
    for folder in filter(None, (beside, os.path.join(EXAMPLES, task, "conf"), os.path.join(EXAMPLES, "demo"))):
        path = os.path.join(folder, f"{name}.args")
        if os.path.isfile(path):
            return path
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        known += [each[: -len(".args")] for each in found if each.endswith(".args")]
    if "/" in name:
        example, _, rest = name.partition("/")
        for path in (name, os.path.join(EXAMPLES, example, "conf", f"{rest}.args")):
            if os.path.isfile(path):
                return path
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
        with open(path, encoding="utf-8") as stream:
            lines = [line.strip() for line in stream]
        for line in lines:
            if line and not line.startswith("#"):
                _read_line(options, path, line, lines, (*open_files, path))


def _read_line(options: Any, path: str, line: str, lines: list[str], open_files: tuple[str, ...]) -> None:
    flag, _, value = line.partition(" ")
    value = value.strip()
    if not flag.startswith("--"):
        raise UsageError(f"{path}: '{line}' is not an option: a line is '--name value'")
    name = flag[2:].replace("-", "_")
    if name == "conf":
        load_conf(options, value, os.path.dirname(path), open_files)
    elif name in options.declared():
        if name not in options.given:
            options.set(name, value or "true")
    elif flag != "--deep-init" or "arch" not in options.given or f"--arch {options.arch}" in lines:
        options.conf_flags[flag] = value  # a start that a job names is its architecture's only
