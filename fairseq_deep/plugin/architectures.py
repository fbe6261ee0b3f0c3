"""The named architectures (``--arch``): one table and its registration with fairseq.

Names follow ``transformer_<method>[_postnorm]_<N>l[<M>l][_<size>]``: N encoder layers, M decoder layers, M written
only where it is not 6. A row presets flags; a flag on the command line overrides them (``presets.py``).

Depths, options and scores of the papers' systems: ``papers.py``. Methods declare other architectures themselves.
"""

import argparse
import fnmatch
import functools
import json
import logging
import os
import types
from collections.abc import Callable
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture

from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.core.description import AXES
from fairseq_deep.core.registry import UsageError, nearest
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.plugin.models.first_look import look_at
from fairseq_deep.plugin.models.hydra import is_filled
from fairseq_deep.plugin.models.legacy import ALIASES, translate_flags

from .papers import COMPARISON, CONNECTED, DEPTH_SCALED, LIPSCHITZ, W19, X24
from .presets import Architecture, apply_aggregator_presets, settle_unused_flags

logger = logging.getLogger(__name__)

COUNTS = os.path.join(os.path.dirname(__file__), "parameters.json")


def _rows(systems: list[tuple], vocab: int = 34040) -> list[Architecture]:
    """Return the rows of *systems*, in the form of ``papers.COMPARISON``."""
    return [
        Architecture(f"transformer_{name}", norm, layer_agg, *depth, size, bleu, paper=paper,
                     vocab=35628 if paper == "X24" else vocab, options=tuple(flags.items()))
        for name, norm, layer_agg, depth, size, bleu, paper, flags in systems
    ]  # fmt: skip


def _declared() -> list[Architecture]:
    """Return the rows that methods declare."""
    rows = []
    for axis, (registry, _) in AXES.items():
        for method in registry.names():
            for name, (norm, depth, flags) in vars(registry.get(method)).get("architectures", {}).items():
                flags = {"layer_agg": "residual", **flags, axis: method}
                rows.append((name, norm, flags.pop("layer_agg"), depth, "base", None, "-", flags))
    return _rows(rows)


def _table() -> list[Architecture]:
    rows = [
        Architecture("transformer_prenorm_6l_big_encoder", "pre", "residual", 6, 6, "base", "27.59", "big", "W19"),
        Architecture("transformer_prenorm_6l_big", "pre", "residual", 6, 6, "big", "28.7", paper="W19"),
        Architecture("transformer_postnorm_6l_big", "post", "residual", 6, 6, "big", "28.8", paper="W19"),
        Architecture("transformer_dlcl_12l_big", "pre", "dlcl", 12, 6, "big", "29.17", paper="W19"),
    ]
    depths = (6, 12, 16, 18, 20, 24, 25, 30)
    # fairseq's own initialisation, so a plain stack equals its model; the recipes of W19 add --deep-init xavier
    for method, norm, layer_agg, base_depths in (
        ("prenorm", "pre", "residual", (*depths, 35, 40, 48, 60)),
        ("postnorm", "post", "residual", depths),
        ("dlcl", "pre", "dlcl", (*depths, 35, 40, 48, 60)),
        ("dlcl_postnorm", "post", "dlcl", depths),
    ):
        for depth in base_depths:
            bleu, paper = W19[method].get(depth), "W19" if depth in W19[method] else "-"
            name = f"transformer_{method}_{depth}l"
            rows.append(Architecture(name, norm, layer_agg, depth, 6, "base", bleu, paper=paper))
        for depth in (6, 12, 20):
            rows.append(Architecture(f"transformer_{method}_{depth}l_iwslt", norm, layer_agg, depth, 6, "iwslt"))
        rows.append(Architecture(f"transformer_{method}_3l3l_small", norm, layer_agg, 3, 3, "small"))
        rows.append(Architecture(f"transformer_{method}_2l2l_tiny", norm, layer_agg, 2, 2, "tiny"))
    rows += _rows(X24, 35628) + _rows(LIPSCHITZ, 35628) + _rows(DEPTH_SCALED, 55022)
    return rows + _rows(CONNECTED) + _rows(COMPARISON) + _declared()


ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _table()}

TWINS = {f"deep_{name}": name for name, model in ARCH_MODEL_REGISTRY.items() if model is TransformerModel}
"""A twin of each architecture of fairseq's Transformer: the same model and presets, with the flags of this package."""


def _apply_twin(stock: str, args: argparse.Namespace) -> None:
    new = look_at(args)
    settle_unused_flags(args, "residual")
    if getattr(args, "encoder_ffn_embed_dim", None) == 0 and getattr(args, "decoder_ffn_embed_dim", None) is None:
        filled = argparse.Namespace()
        ARCH_CONFIG_REGISTRY[stock](filled)
        args.decoder_ffn_embed_dim = filled.decoder_ffn_embed_dim  # fairseq's default, not the encoder's width
    if new:
        apply_aggregator_presets(args)
    if getattr(args, "layer_agg", None) is None:
        args.layer_agg = "residual"
    ARCH_CONFIG_REGISTRY[stock](args)


def _apply_alias(alias: str, args: argparse.Namespace) -> None:
    name, flags = ALIASES[alias]
    logger.warning("architecture %s is called %s here", alias, name)
    look_at(args)
    translate_flags(args)
    for flag, value in flags.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
    ARCHITECTURES[name].apply(args)


def _apply_once(apply: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run an architecture function, unless it has run: fairseq also calls it when it builds a model.

    A checkpoint of other code has all flags of fairseq, but no ``--layer-agg``.
    """
    if not (is_filled(args) and hasattr(args, "layer_agg")):
        apply(args)


for _name, _apply in {
    **{twin: functools.partial(_apply_twin, stock) for twin, stock in TWINS.items()},
    **{name: row.apply for name, row in ARCHITECTURES.items()},
    **{alias: functools.partial(_apply_alias, alias) for alias in ALIASES},
}.items():
    register_model_architecture("deep_transformer", _name)(functools.partial(_apply_once, _apply))


def list_archs(pattern: str = "*") -> list[str]:
    """Return the names for ``--arch`` that match the shell wildcard *pattern*, in alphabetical order.

    The list omits the twins of fairseq's architectures (``deep_transformer``, ``deep_transformer_iwslt_de_en``, ...)
    and the names of the original DLCL code. ``--arch`` accepts these names as well.
    """
    return sorted(fnmatch.filter(ARCHITECTURES, pattern))


def resolved_presets(name: str) -> dict[str, Any]:
    """Return the flags that *name* presets, with the values that its architecture function fills in.

    Raises:
        UsageError: the architecture is unknown
    """
    row, filled, stock = get_architecture(name), argparse.Namespace(), argparse.Namespace()
    row.apply(filled)
    base_architecture(stock)
    named = {**row.presets(), **dict(row.options)}
    differs = [flag for flag, value in vars(filled).items() if getattr(stock, flag, None) != value]
    return {flag: getattr(filled, flag) for flag in dict.fromkeys([*named, *differs]) if hasattr(filled, flag)}


def get_architecture(name: str) -> Architecture:
    """Return the row called *name*.

    Raises:
        UsageError: the architecture is unknown; the message suggests similar names
    """
    if name not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {name}{nearest(name, ARCHITECTURES)}: see fairseq-deep archs")
    return ARCHITECTURES[name]


def build_architecture(name: str, dictionary: Dictionary, **flags: Any) -> DeepTransformerModel:
    """Build an untrained model called *name* without fairseq's command line.

    Args:
        name: an architecture
        dictionary: fairseq's dictionary, shared by both languages
        flags: model flags, with underscores; they override the presets
    """
    args = argparse.Namespace(arch=name, **flags)
    get_architecture(name).apply(args)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return DeepTransformerModel.build_model(args, task)


def stored_count(name: str) -> int:
    """Return `count_parameters`, from a table where it has *name*: to build all models takes a minute."""
    return _stored_counts().get(name) or count_parameters(name)


@functools.cache
def _stored_counts() -> dict[str, int]:
    with open(COUNTS, encoding="utf-8") as stream:
        return json.load(stream)


def count_parameters(name: str) -> int:
    """Count the parameters of *name* for the paper's vocabulary, with embeddings shared where the widths allow it."""
    row = get_architecture(name)
    dictionary = Dictionary()
    for index in range(row.vocab - len(dictionary)):
        dictionary.add_symbol(str(index))
    shared = row.encoder_size is None
    with skip_initialisation():
        model = build_architecture(
            name, dictionary, share_all_embeddings=shared, share_decoder_input_output_embed=True
        )
    return sum(parameter.numel() for parameter in model.parameters())
