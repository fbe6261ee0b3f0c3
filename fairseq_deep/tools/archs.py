"""list the named architectures with norm, depth, size, parameters and a paper's BLEU"""

import argparse
import fnmatch
import json
import re
from typing import Any

from fairseq_deep import list_archs
from fairseq_deep.errors import UsageError, nearest
from fairseq_deep.tools.checkpoints import check_fairseq
from fairseq_deep.tools.flags import actions
from fairseq_deep.tools.tables import format_table

EXAMPLE = "fairseq-deep archs 'transformer_dlcl_*'"
HEADER = ("name", "norm", "depth", "size", "parameters", "paper's BLEU", "in")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pattern and ``--json``."""
    text = "part of a name, or a quoted shell wildcard, such as 'transformer_dlcl*' (default: all)"
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help=text)
    parser.add_argument("--verbose", action="store_true", help="also print family, origin and preset flags of each")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the architectures that match the pattern."""
    check_fairseq()
    others = _others()
    names = select_names([*list_archs(), *others], args.pattern)
    records = [_record(name, args.verbose) for name in names if name not in others]
    twins = [{"name": name, "twin_of": others[name]} for name in names if name in others]
    if args.json:
        print(json.dumps(records + twins, indent=2))
        return 0
    if records:
        _print_table(records)
    for record in records if args.verbose else []:
        presets = [(flag, str(value)) for flag, value in record["presets"].items()]
        print(f"\n{record['name']}: {record['family']}, {record['origin']}; presets")
        print(format_table(presets, indent="  "))
    for each in twins:
        print(f"{each['name']}: {'as ' + each['twin_of'] if each['twin_of'] else 'of a plugin'}, with our flags")
    return 0


def _print_table(records: list[dict[str, Any]]) -> None:
    rows = [HEADER] + [
        (
            record["name"],
            record["norm"],
            f"{record['encoder_layers']}/{record['decoder_layers']}",
            record["size"] if record["encoder_size"] is None else f"{record['encoder_size']}/{record['size']}",
            f"{record['parameters']:,}",
            record["bleu"] or "-",
            record["paper"] or "-",
        )
        for record in records
    ]
    print(format_table(rows, right=(2, 4, 5)))
    vocabularies = [f"{size:,}" for size in sorted({record["vocab"] for record in records})]
    print(
        f"{len(records)} architecture{'s' if len(records) > 1 else ''}; depth, size: encoder/decoder; "
        f"parameters: with {' or '.join(vocabularies)} entries"
    )


def select_names(known: list[str], pattern: str) -> list[str]:
    """Return the names in `known` that match the shell wildcard `pattern`, or contain it, in natural order.

    Raises:
        UsageError: nothing matches; the message suggests similar names.
    """
    part = pattern not in known and not re.search(r"[*?\[\]]", pattern)
    names = sorted(fnmatch.filter(known, f"*{pattern}*" if part else pattern), key=natural_key)
    if not names:
        parts = (word for name in known for word in name.split("_"))
        hint = f"{nearest(pattern, [*known, *parts])}; 'fairseq-deep archs' lists all"
        raise UsageError(f"no architecture matches '{pattern}'{hint}")
    return names


def natural_key(name: str) -> list[Any]:
    """Return a sort key under which ``_6l`` comes before ``_20l``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _others() -> dict[str, str | None]:
    """Return the twins with the architecture of fairseq of each, and the architectures of plugins with None."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_deep.plugin.architectures import ALIASES, ARCHITECTURES, TWINS, DeepTransformerModel

    ours = (name for name, model in ARCH_MODEL_REGISTRY.items() if model is DeepTransformerModel)
    return {name: TWINS.get(name) for name in ours if name not in ARCHITECTURES and name not in ALIASES}


def _record(name: str, verbose: bool) -> dict[str, Any]:
    from fairseq_deep.plugin.architectures import ARCHITECTURES, resolved_presets, stored_count

    arch = ARCHITECTURES[name]
    fields = ("name", "family", "origin", "paper", "norm", "layer_agg", "encoder_layers", "decoder_layers")
    fields += ("encoder_size", "size", "vocab", "bleu")
    record = {field: getattr(arch, field) for field in fields}
    record["parameters"] = stored_count(name)
    if verbose:
        record["presets"] = _presets(resolved_presets(name))
    return record


def _presets(values: dict[str, Any]) -> dict[str, Any]:
    """Return {flag: value}; the value of a switch is whether it is on."""
    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

    presets, known = {}, actions(DeepTransformerModel.add_args)
    for name, value in values.items():
        action = known.get(name)
        flag = max(action.option_strings, key=len) if action else f"--{name.replace('_', '-')}"
        presets[flag] = value is action.const if action and action.nargs == 0 else value
    return presets
