"""Refusals as text files: a command on a line, and below it, indented, the line that it ends with.

``...`` in a line stands for any text. Lines that begin with $ are run by bash before the command; # is a comment.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

ROW = r"(?m)^((?:\$ .*\n)*)([^#$\s].*)\n((?: {4}.*\n)+)"
PARSER = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
DeepTransformerModel.add_args(PARSER)
PARSER.add_argument("--ddp-comm-hook")
for switch in ("--fp16", "--bf16"):
    PARSER.add_argument(switch, action="store_true")
for action in PARSER._actions:
    action.default, action.type = argparse.SUPPRESS, None if "to_keep" in action.dest else action.type


def rows(name):
    """The rows (lines for bash, command, line) of tests/errors/NAME.txt, as parameters of a test."""
    text = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    for before, command, said in re.findall(ROW, text):
        yield pytest.param(before.replace("$ ", ""), command, " ".join(said.split("\n    ")).strip(), id=command[:80])


def assert_says(line, said):
    """Whether a *line* is what a row has for it."""
    assert "\n" not in line.strip(), line
    assert re.fullmatch(".*".join(map(re.escape, said.split("..."))), line.strip()), f"{line!r} is not {said!r}"


def read_model(line):
    """The name of an architecture, without transformer_, and the flags after it."""
    arch, *words = shlex.split(line)
    return arch, vars(PARSER.parse_args(words))
