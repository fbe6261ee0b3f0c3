"""Scripts written by a recipe: its command, and a command that resumes it."""

from __future__ import annotations

import os

from .options import flag_of, quote
from .plan import Plan


def write_commands(plan: Plan, script: str, words: list[str]) -> None:
    """Write ``cmd.sh`` with the user's command, and ``resume.sh``, which resumes it."""
    kept, others = without_options(words, "stage", "stop_stage", "node_rank")  # markers record the finished stages
    _write(plan.path("cmd.sh"), script, quote(words))
    _write(plan.path("resume.sh"), script, f'{quote(kept)} "$@" {quote(others)}')


def _environment() -> list[str]:
    """Return the lines that change to the current directory and set environment variables of the scripts."""
    chosen = {name: os.environ.get(name) for name in ("FAIRSEQ_DEEP_ENV", "WMT_URL")}
    exports = [quote(["export", f"{name}={value}"]) for name, value in chosen.items() if value]
    return [quote(["cd", os.getcwd()]), *exports]


def _write(path: str, script: str, words: str) -> None:
    # exec forwards signals from this file's shell to the recipe
    lines = ["#!/usr/bin/env bash", *_environment(), f"{quote(['exec', script])} {words}"]
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n")
    os.chmod(f"{path}.new", 0o755)
    os.replace(f"{path}.new", path)


def without_options(words: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Return the words before ``--`` without the options *names* and their values, and the rest."""
    flags, kept, rest = [flag_of(name) for name in names], [], list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in flags:
            kept.append(word)
        elif not equals and rest:
            rest.pop(0)
    return kept, rest
