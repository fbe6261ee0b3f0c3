"""Outputs of the commands as text files in ``tests/snapshots``; sizes and initial values of all methods.

``python -m tests.helpers.snapshots`` renews the files; read their difference before committing it. A line of a
``plan_*.txt`` with a $ is a command, whose plan follows; to add a plan, write such a line.
"""

import argparse
import contextlib
import io
import re
import shlex
import sys
from functools import partial

from fairseq_deep import cli
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.recipes.compare.options import Compare
from fairseq_deep.recipes.recipe import Recipe
from tests.helpers.inits import CASES, initial_values
from tests.helpers.methods import LANGUAGES, METHODS, OPTIONS
from tests.helpers.models import POSTNORM, PRENORM, VOCAB, make_tagged_dictionary, size_of, tiny_flags
from tests.helpers.paths import ROOT
from tests.helpers.recipes import driven

FOLDER = ROOT / "tests/snapshots"
EXP = "/nowhere/at/all"
MACHINE = ((re.escape(str(ROOT)), "ROOT"), (EXP, "EXP"), (r"[\d,.]+ GB free", "N GB free"),
           (r"--workers \d+", "--workers N"), (r"(--python \| 3.X \|  \|) [\d.]+", r"\1 N"))  # fmt: skip
"""What depends on the machine, and its replacement."""


def papers():
    """The commands in examples/papers.txt."""
    lines = (ROOT / "examples/papers.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def claims():
    """The commands in the heads of ``examples/claims/*.txt``, for the built-in corpus."""
    for path in sorted((ROOT / "examples/claims").glob("*.txt")):
        head = re.sub(r"\\\n# +", "", path.read_text(encoding="utf-8"))
        [command] = re.findall(r"(?m)^#     (examples/compare/run\.sh .*)", head)
        yield re.sub(r" --exp \S+", "", command).replace("--data DIR", "--demo --ngpu 1")


def plan(command):
    """The output of a dry run, or its error."""
    program, *words = shlex.split(command)
    done = driven(ROOT / program, "--dry-run", "--exp", EXP, *([] if "--ngpu" in words else ["--ngpu", "8"]), *words)
    assert done.returncode in (0, 2), done
    return f"$ {command}\n{done.stdout}{done.stderr}"


def arguments(parser, name):
    """Every argument of *parser* and of its sub-commands, independent of the layout of Python's release."""
    lines = [f"{name}: {parser.description}"]
    lines += re.findall(r"example:\n.+", parser.epilog or "")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines += [arguments(each, f"{name} {key}") for key, each in action.choices.items()]
        elif action.dest != "help":
            names = ", ".join(action.option_strings) or action.dest
            default = action.default if action.default not in (None, argparse.SUPPRESS) else ""
            lines.append(f"  {names} | {action.metavar} | {action.choices or ''} | {default} | {action.help}")
    return "\n".join(lines).replace("example:\n  ", "  example: ")


def helps():
    """All arguments of ``fairseq-deep`` and of the recipes."""
    drivers = {"recipe": Recipe, "compare": Compare}
    return "\n\n".join([arguments(cli.make_parser()[0], "fairseq-deep"),
                        *(arguments(kind().parser(name), name) for name, kind in drivers.items())])  # fmt: skip


def output(*words):
    """The standard output of ``fairseq-deep`` with *words*."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli.main(words) == 0
    return said.getvalue()


def starts(arch, flags):
    """{(parameter, its initial values)} of a narrow model with 2 + 2 layers, all layers alike; its size."""
    flags = {**tiny_flags(arch), "encoder_layers": 2, "decoder_layers": 2, **flags}
    found, words = {}, make_tagged_dictionary(VOCAB, 24)
    model, starts = initial_values(lambda: build_architecture(arch, words, **flags))
    for key, values in starts.items():
        texts = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
        found.setdefault(re.sub(r"\d+", "N", key), []).append(" ".join(texts))
    return dict.fromkeys((key, ", ".join(dict.fromkeys(texts))) for key, texts in found.items()), size_of(model)


def initial():
    """Numbers of parameters, their names, which checkpoints have, and initial values: a distribution, or a few values.

    Without what plain models and the first one with that initialisation have. The 1 of a weight, the 0 of a bias: once.
    """
    plain, lines = starts(PRENORM, {})[0] | starts(POSTNORM, {})[0], []
    known, seen = {None: plain}, set()
    for name, (arch, flags) in {**METHODS, **OPTIONS, **LANGUAGES, **CASES}.items():
        (found, size), init = starts(arch, flags), flags.get("deep_init")
        new = [row for row in found if row not in known.get(init, plain)]
        lines.append(f"{name}: {size:,} parameters")
        lines += [f"  {key}: {text}" for key, text in new
                  if text != str(int(key.endswith("weight"))) or (key, text) not in seen]  # fmt: skip
        known.setdefault(init, {**plain, **found})
        seen |= found.keys()
    return "\n".join(lines)


def plans(path):
    """The plan of each command in a file, whose lines with a $ are the commands."""
    return "\n".join(map(plan, re.findall(r"(?m)^\$ (.*)", path.read_text(encoding="utf-8"))))


def cases():
    """{name of the file: function that makes its text}."""
    return {
        **{path.stem: partial(plans, path) for path in FOLDER.glob("plan_*.txt")},
        "help": helps,
        "initial": initial,
        "flags": partial(output, "flags"),
        "archs": partial(output, "archs", "--verbose"),
    }


def text_of(make):
    """The text of a case without what depends on the machine."""
    text = make()
    for pattern, new in MACHINE:
        text = re.sub(pattern, new, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def write():
    """Renew all files."""
    for name, make in cases().items():
        (FOLDER / f"{name}.txt").write_text(text_of(make), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
