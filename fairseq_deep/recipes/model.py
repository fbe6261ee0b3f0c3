"""The model of a training command: its flags as fairseq-train parses them, and the formats that it can have."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
from collections.abc import Iterable

from fairseq_deep.errors import UsageError, nearest


def parse_flags(words: list[str], others: Iterable[str] = ()) -> argparse.Namespace:
    """Return the flags of a fairseq-train command as fairseq parses them.

    Args:
        others: flags that a user may have meant by an unknown one, in addition to fairseq's

    Raises:
        UsageError: where fairseq's parser would exit
    """
    from fairseq import options

    parser = options.get_training_parser()

    def refuse(message: str) -> None:
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            flag = unknown[1].partition("=")[0]
            message = f"unknown flag '{flag}'{nearest(flag, [*parser._option_string_actions, *others])}"
        raise UsageError(message.removeprefix("argument "))

    parser.error = refuse  # type: ignore[method-assign, assignment]
    return options.parse_args_and_arch(parser, list(words))


@functools.cache
def parse_command(command: tuple[str, ...], others: tuple[str, ...] = ()) -> argparse.Namespace:
    """Return the flags of a fairseq-train *command*, completed by its architecture, without building the model.

    Args:
        others: other flags that a user may have meant by an unknown one

    Raises:
        UsageError: the architecture is unknown, or a flag is unknown, has a wrong value or contradicts another one
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_deep
    from fairseq_deep.core.description import describe

    for name in ("fairseq", "fairseq_deep"):  # fairseq-train logs the same messages
        logging.getLogger(name).setLevel(logging.WARNING)
    arch = command[command.index("--arch") + 1]
    if arch not in ARCH_MODEL_REGISTRY:
        raise UsageError(f"unknown --arch {arch}{nearest(arch, ARCH_MODEL_REGISTRY)}: fairseq-deep archs lists them")
    words = [word for word in command[1:] if word != "--fp16"]  # it requires a GPU
    args = parse_flags([*words, "--save-dir", os.devnull], others)  # without a look at a checkpoint
    if arch in fairseq_deep.list_archs():
        describe(_with_languages(args))
    return args


def _with_languages(args: argparse.Namespace) -> argparse.Namespace:
    """Return *args* with a number of languages; training counts the tags in the dictionary."""
    from fairseq_deep.core.languages import chosen_flag

    return argparse.Namespace(**{**({"num_languages": 1} if chosen_flag(args) else {}), **vars(args)})


def describe_exports(args: argparse.Namespace) -> str:
    """Describe the formats that a model with the flags *args* can have; empty if it is not a model of this package."""
    import fairseq_deep
    from fairseq_deep.plugin.architectures import TWINS
    from fairseq_deep.runtime.plain import NAMES, formats_of

    if args.arch not in {*fairseq_deep.list_archs(), *TWINS}:
        return ""
    formats, why = formats_of(_with_languages(args))
    line = ", ".join(["exports  torch (.pt2), package", *formats])
    missing = ", ".join(name for name in NAMES.values() if name not in formats)
    return line + (f"; not {missing} ({why})" if missing else "")
