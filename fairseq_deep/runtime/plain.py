"""Conversion of trained models to plain Transformers, for programs that support only fairseq's `transformer`.

Constant factors and the weights of streams are folded into the weights. Structures that a format does not support are
rejected.
"""

import argparse
from typing import Any

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.checks import choices_of
from fairseq_deep.core.description import describe
from fairseq_deep.core.folding import fold
from fairseq_deep.core.stream_folding import fold_streams
from fairseq_deep.errors import UsageError

NAMES = {"fairseq": "fairseq's transformer", "ctranslate2": "CTranslate2", "huggingface": "transformers"}
RESIDUALS = {"ctranslate2": ("peri",)}
"""Residual connections that a format supports directly."""
OPTIONS = {"ctranslate2": ("relative_positions", "positions", "norm", "ffn", "kv_heads")}
"""Options of layers that a format supports."""


class Unsupported(UsageError):
    """A format does not support a model."""


def check_layers(path: str, flags: argparse.Namespace, format: str) -> None:
    """Raise `Unsupported` if the model's layers differ from the layers of fairseq's `transformer`."""
    for side, stack in describe(flags).items():
        init, residual = stack.init.method, stack.residual
        supported = {
            **dict.fromkeys(("embedding_norm", "alignment_layer", *OPTIONS.get(format, ())), True),
            "aggregator": may_be_plain(stack.aggregator),
            "residual": residual.method.foldable or residual.name in RESIDUALS.get(format, ()),
            "init": (not init.connects or init.folds_stream) and init.layer_norm,
            "language_transform": side == "decoder",
        }
        for name, chosen in choices_of(stack).items():
            if not supported.get(name):
                raise Unsupported(f"{path} has {chosen} ({side}), which {NAMES[format]} does not support")


def formats_of(flags: argparse.Namespace) -> tuple[list[str], str]:
    """Return the formats for plain Transformers that a new model with *flags* can have, and why not another one."""
    found, why = [], ""
    for format, name in NAMES.items():
        try:
            check_layers("it", flags, format)
        except Unsupported as error:
            why = why or error.message.removeprefix("it has ").partition(" (")[0]
        else:
            found.append(name)
    stacks = describe(flags).values()
    if found and any(stack.aggregator.name != "residual" for stack in stacks):  # weights that training changes
        return [], "--layer-agg dlcl"
    return found, why


def may_be_plain(aggregator: Any) -> bool:
    """Return whether layers with this aggregator may read only the layer below; DLCL's weights can still differ."""
    return aggregator.name == "residual" or aggregator.name == "dlcl" and aggregator.options.get("no_norm", False)


def check_weights(path: str, model: Any, format: str) -> None:
    """Raise `Unsupported` if the weights of DLCL do not exactly represent residual connections."""
    for side in ("encoder", "decoder"):
        aggregator = getattr(getattr(model, side), "aggregator", None)
        if isinstance(aggregator, Dlcl) and not aggregator.is_plain():
            kind = "with weights that are not exactly residual"
            raise Unsupported(f"{path} has --layer-agg dlcl ({side}) {kind}, which {NAMES[format]} does not support")


def fold_all(path: str, model: Any, tables: bool = False) -> bool:
    """Fold the weights of streams, then constant factors; return whether the model has such weights.

    Args:
        tables: whether the format stores fixed positions
    """
    try:
        streams = fold_streams(model, tables)
        fold(model)
    except UsageError as error:
        raise Unsupported(f"{path} has {error}") from error
    return bool(streams)
