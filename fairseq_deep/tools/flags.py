"""list the flags that this package adds to fairseq, with method or axis, type or choices, default and help"""

import argparse
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.tools.checkpoints import check_fairseq

EXAMPLE = "fairseq-deep flags dlcl"
WIDTH = 100
GENERAL, TASK = "model", "task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the method and ``--json``."""
    text = "a method (dlcl), an axis (layer-agg), 'model' or 'task' (default: all flags)"
    parser.add_argument("method", nargs="?", metavar="METHOD", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the flags of the method or axis."""
    check_fairseq()
    records = list(_records())
    if args.method is not None:
        records = _select(records, args.method)
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    for record in records:
        of = f"{record['axis']} {'|'.join(record['methods'])}".strip()
        shown = record["default"] is None or "(default: " in record["help"]
        default = "" if shown else f"; default: {record['default']}"
        choices = [choice for choice in record["choices"] or () if choice not in record["help"]]
        kind = "{" + ", ".join(record["choices"]) + "}" if choices else record["type"]
        for indent, text in (("", f"{record['flag']} {kind} [{of}]"), ("    ", record["help"] + default)):
            print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent or "        ",
                                break_long_words=False, break_on_hyphens=False))  # fmt: skip
    print(f"{len(records)} flag{'s' if len(records) != 1 else ''}")
    return 0


def _select(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    from fairseq_deep import list_archs
    from fairseq_deep.core.description import REGISTRIES
    from fairseq_deep.core.registry import nearest

    methods = {method for registry in REGISTRIES for method in registry.names()}
    groups = {record["axis"].lstrip("-") for record in records}
    known = {each.replace("_", "-"): each for each in methods | groups}
    wanted = known.get(name.lstrip("-").replace("_", "-"))
    if wanted is None:
        hint = nearest(name.lstrip("-"), methods | groups) or f"; methods: {', '.join(sorted(methods))}"
        if any(name in arch for arch in list_archs()):
            hint = f"; for architectures, run: fairseq-deep archs {name}"
        raise UsageError(f"METHOD: unknown method or axis {name}{hint}; 'fairseq-deep flags' lists all")
    return [record for record in records if wanted in (record["axis"].lstrip("-"), *record["methods"])]


def _records() -> Iterator[dict[str, Any]]:
    """Yield a record per flag, from the parsers of fairseq-train."""
    from fairseq.models.transformer import TransformerModel
    from fairseq.tasks.translation import TranslationTask

    from fairseq_deep.core.description import AXES, SIDED, SIDES
    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
    from fairseq_deep.plugin.task import DeepTranslationTask

    owners = _owners()
    axis_of = {axis: axis for axis in AXES} | {f"{side}_{axis}": axis for side in SIDES for axis in SIDED}
    for dest, action in added(DeepTransformerModel.add_args, TransformerModel.add_args).items():
        if dest in owners:
            registry, methods = owners[dest]
            yield _record(action, registry.kind, _default(registry, methods[-1], action), methods)
        elif dest in axis_of:
            registry, default = AXES[axis_of[dest]]
            yield _record(action, registry.kind, default if dest in AXES else None, choices=registry.names())
        else:
            yield _record(action, GENERAL, False if action.nargs == 0 else None)
    for action in added(DeepTranslationTask.add_args, TranslationTask.add_args).values():
        yield _record(action, TASK, action.default)


def _owners() -> dict[str, tuple[Any, list[str]]]:
    """Return the registry and the methods of each flag of a method."""
    from fairseq_deep.core.description import REGISTRIES

    found: dict[str, tuple[Any, list[str]]] = {}
    for registry in REGISTRIES:
        for name in registry.names():
            for dest in actions(registry.get(name).add_args):
                found.setdefault(dest, (registry, []))[1].append(name)
    return found


def _default(registry: Any, name: str, action: argparse.Action) -> Any:
    """Return the default of a method's option in new models; of a switch, whether it is on."""
    method, option = registry.get(name), action.dest[len(registry.prefix(name)) + 1 :]
    parameter = inspect.signature(method.__init__).parameters.get(option)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    default = getattr(method, "presets", {}).get(option, default)
    return default is action.const if action.nargs == 0 else default  # some switches store False


def actions(add_args: Callable[[Any], None]) -> dict[str, argparse.Action]:
    """Return the actions that *add_args* adds to a parser, by destination."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_args(parser)
    return {action.dest: action for action in parser._actions}


def added(ours: Callable[[Any], None], stock: Callable[[Any], None]) -> dict[str, argparse.Action]:
    """Return the actions of *ours* that are not in *stock*."""
    known = actions(stock)
    return {dest: action for dest, action in actions(ours).items() if dest not in known}


def _record(
    action: argparse.Action, axis: str, default: Any, methods: Sequence[str] = (), choices: Iterable[str] | None = None
) -> dict[str, Any]:
    kind = {int: "int", float: "float"}.get(action.type, "str")
    return {
        "flag": max(action.option_strings, key=len),
        "axis": axis,
        "methods": list(methods),
        "type": "switch" if action.nargs == 0 else kind,
        "choices": [str(choice) for choice in choices or action.choices or ()] or None,
        "default": default if isinstance(default, (bool, int, float, type(None))) else str(default),
        "help": " ".join((action.help or "").split()),
    }
