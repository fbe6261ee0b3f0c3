"""The named architectures (``--arch``): one table, and the loop that registers it with fairseq.

Names follow ``transformer_<method>[_postnorm]_<N>l[<M>l][_<size>]``: N encoder layers, M decoder layers, M written
only where it is not 6. A row presets flags; a flag on the command line beats its preset.

Depths, options and scores of the papers' systems: ``papers.py``.
"""

import argparse
import functools
import logging
import types
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from fairseq.data import Dictionary
from fairseq.models import register_model_architecture
from fairseq.models.transformer import base_architecture

from .aggregators import AGGREGATORS
from .compat import skip_initialisation
from .models.checks import check_flags
from .models.deep_transformer import DeepTransformerModel
from .models.description import AXES, DECODER, SIDED, SIDES, describe, method_name
from .models.idle_flags import settle_idle_flags
from .models.legacy import ALIASES, translate_flags
from .papers import COMPARISON, ORIGINS, W19, X20, X24, Z19, Z19_MATT
from .registry import UsageError, nearest

logger = logging.getLogger(__name__)

# width, feed-forward width, attention heads, dropout
SIZES = {
    "base": (512, 2048, 8, 0.1),
    "big": (1024, 4096, 16, 0.3),
    "iwslt": (512, 1024, 4, 0.3),
    "small": (256, 512, 4, 0.1),
    "tiny": (32, 64, 2, 0.1),
}


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: the value of ``--arch``
        norm: "pre", "post", or "-" where the aggregator has its own
        layer_agg: how layers are connected
        encoder_layers, decoder_layers: depth
        size: a key of ``SIZES``, for the decoder and, unless *encoder_size* says otherwise, the encoder
        bleu: what the paper prints (a score, or "failed"), or None
        encoder_size: a key of ``SIZES`` where the encoder's differs
        paper: key of the paper that has this system, or "-"
        vocab: entries of the vocabulary that parameters are counted with: the paper's
        options: further flags and their values; left out are those of a method that the user replaces, and those that
            do not go with the aggregator or the attention that the user asks for
    """

    name: str
    norm: str
    layer_agg: str
    encoder_layers: int
    decoder_layers: int
    size: str
    bleu: Optional[str] = None
    encoder_size: Optional[str] = None
    paper: str = "-"
    vocab: int = 34040
    options: Tuple[Tuple[str, Any], ...] = ()

    @property
    def chosen(self) -> Dict[str, str]:
        """The method of the row on each axis."""
        options = {**dict(self.options), "layer_agg": self.layer_agg}
        return {axis: options.get(axis, default) for axis, (_, default) in {**SIDED, **DECODER}.items()}

    @property
    def methods(self) -> Dict[str, Any]:
        """The methods of the row other than the plain ones, by name: their classes."""
        axes = {**SIDED, **DECODER}
        return {name: axes[axis][0].get(name) for axis, name in self.chosen.items() if name != axes[axis][1]}

    @property
    def family(self) -> str:
        """What the row is a case of: its methods, or the norm placement of a plain stack."""
        names = [name for name in self.methods if name not in ("xavier",)]
        return "+".join(names) or {"pre": "pre-norm", "post": "post-norm"}[self.norm]

    @property
    def origin(self) -> str:
        """Whose system it is, with the year."""
        name = self.name[len("transformer_") :]
        papers = [method.paper for key, method in self.methods.items() if method.paper and key != "xavier"]
        plain = "Wang 2019" if self.norm == "pre" else "Vaswani 2017"
        return ORIGINS.get(name) or ORIGINS.get(name.partition("_")[0]) or ", ".join(dict.fromkeys(papers)) or plain

    def presets(self) -> Dict[str, Any]:
        """The flags that the row presets."""
        presets: Dict[str, Any] = {"layer_agg": self.layer_agg}
        for side, size in (("encoder", self.encoder_size or self.size), ("decoder", self.size)):
            dim, ffn, heads, _ = SIZES[size]
            presets[f"{side}_embed_dim"] = dim
            presets[f"{side}_ffn_embed_dim"] = ffn
            presets[f"{side}_attention_heads"] = heads
            presets[f"{side}_normalize_before"] = self.norm != "post"
        presets["encoder_layers"] = self.encoder_layers
        presets["decoder_layers"] = self.decoder_layers
        presets["dropout"] = SIZES[self.size][3]
        # W19, Section 4.2: the pre-norm systems add dropout on attention and feed-forward. X24 prints none; the public
        # settings of its authors' earlier paper (X20) have it, too.
        presets["attention_dropout"] = presets["activation_dropout"] = 0.0 if self.norm == "post" else 0.1
        return presets

    def apply(self, args: argparse.Namespace) -> None:
        """Fill what *args* leaves open: fairseq's architecture function."""
        settle_idle_flags(args, self.layer_agg)
        self._follow_user(args)
        for flag, value in self.presets().items():
            if getattr(args, flag, None) is None:
                setattr(args, flag, dict(self.options).get(flag, value))
        self._apply_options(args)
        base_architecture(args)

    def _apply_options(self, args: argparse.Namespace) -> None:
        """Fill the row's further flags: those of methods that are asked for, and that go with another aggregator."""
        aggregators = [method_name(args, side, "layer_agg") for side in SIDES]
        other_attention = args_or(args, "decoder_attn", "self") != self.chosen["decoder_attn"]
        other = other_attention or any(name != self.layer_agg for name in aggregators)
        # an initialisation yields to what replaces the residual connections that it is about
        replaced = not all(AGGREGATORS.get(name).layout("encoder", {}).residual for name in aggregators)
        left = []
        for flag, value in self.options:
            if getattr(args, flag, None) is not None or not self._is_asked_for(args, flag):
                continue
            if flag in AXES or not other or (flag == "deep_init" and not replaced):
                setattr(args, flag, value)
            else:
                left.append((flag, value))
        for flag, value in left + left:  # twice, since one may need another
            if getattr(args, flag, None) is None and _fits(args, flag, value):
                setattr(args, flag, value)

    def _is_asked_for(self, args: argparse.Namespace, flag: str) -> bool:
        """Whether *flag* is of no method of the row, or of one that *args* do not replace."""
        names = {axis: [method_name(args, side, axis, self.chosen[axis]) for side in SIDES] for axis in SIDED}
        names.update({axis: [args_or(args, axis, self.chosen[axis])] for axis in DECODER})
        for axis, name in self.chosen.items():
            registry = {**SIDED, **DECODER}[axis][0]
            option = flag[len(registry.prefix(name)) + 1 :]
            if flag == f"{registry.prefix(name)}_{option}":
                of_decoder = option in registry.get(name).decoder_options
                return names[axis][-1] == name if of_decoder else name in names[axis]
        # relative positions of layers that an aggregator makes are for its own layers
        whole = AGGREGATORS.get(self.layer_agg).layout("encoder", {}).residual
        return whole or not flag.startswith("relative_") or set(names["layer_agg"]) == {self.layer_agg}

    @staticmethod
    def _follow_user(args: argparse.Namespace) -> None:
        """What a flag says for another too, as in fairseq: widths of the encoder, and the old name of a dropout."""
        for flag, follower in (
            ("encoder_embed_dim", "decoder_embed_dim"),
            ("encoder_ffn_embed_dim", "decoder_ffn_embed_dim"),
            ("relu_dropout", "activation_dropout"),
        ):
            value = getattr(args, flag, None)
            nothing = value is None or (value == 0 and "ffn" in flag)  # 0: an encoder without feed-forward sub-layers
            if not nothing and getattr(args, follower, None) is None:
                setattr(args, follower, value)


def args_or(args: argparse.Namespace, flag: str, default: Any) -> Any:
    """The value of *flag*, or *default* where it is not given."""
    value = getattr(args, flag, None)
    return default if value is None else value


def _fits(args: argparse.Namespace, flag: str, value: Any) -> bool:
    """Whether a row's option goes with what the user asked for: it is left out if it alone would be refused."""
    return _refusal(args, {flag: value}) in (None, _refusal(args, {}))


def _refusal(args: argparse.Namespace, more: Dict[str, Any]) -> Optional[str]:
    flags = argparse.Namespace(**{**vars(args), **more})
    base_architecture(flags)
    try:
        check_flags(flags, describe(flags))
    except UsageError as error:
        return str(error)
    return None


def _depth_name(encoder: int, decoder: int) -> str:
    return f"{encoder}l" if decoder == 6 else f"{encoder}l{decoder}l"


def _initialised_rows() -> List[Architecture]:
    """Plain stacks that differ in how they start and (DeepNet, Admin) in the residual connection that this needs."""
    rows = []
    dropouts = (("attention_dropout", 0.1), ("activation_dropout", 0.1))
    for depth, scores in X20.items():
        for order, norm, bleu in (("_postnorm", "post", scores[0]), ("", "pre", scores[1])):
            options = (("deep_init", "lipschitz"), *dropouts)
            options += (("layernorm_embedding", True),) if norm == "post" else ()
            name = f"transformer_lipschitz{order}_{_depth_name(*depth)}"
            rows.append(
                Architecture(name, norm, "residual", *depth, "base", bleu, paper="X20", vocab=35628, options=options)
            )
    for depth, (bleu, dropout, attention_dropout) in Z19.items():
        options = (("deep_init", "ds"), ("dropout", dropout), ("attention_dropout", attention_dropout), dropouts[1])
        shape = ("post", "residual", depth, depth, "base", bleu)
        name = f"transformer_ds_{_depth_name(depth, depth)}"
        rows.append(Architecture(name, *shape, paper="Z19", vocab=55022, options=options))
    for name, depth, size, bleu, dropout, attention_dropout in Z19_MATT:
        options = (("dropout", dropout), ("attention_dropout", attention_dropout), dropouts[1])
        options += (("decoder_attn", "merged"),)
        options += (("deep_init", "ds" if name.startswith("ds_") else "xavier"),)
        shape = ("post", "residual", depth, depth, size, bleu)
        paper = "-" if size == "iwslt" else "Z19"
        rows.append(Architecture(f"transformer_{name}", *shape, paper=paper, vocab=55022, options=options))
    for init in ("deepnet", "admin"):
        for depth in ((18, 18), (24, 24), (30, 30), (60, 12)):
            name = f"transformer_{init}_{_depth_name(*depth)}"
            options = (("deep_init", init), *dropouts)
            rows.append(Architecture(name, "post", "residual", *depth, "base", options=options))
    return rows


def _depthwise_rows() -> List[Architecture]:
    return [
        Architecture(
            f"transformer_{name}",
            "-",
            name.partition("_")[0],
            *depth,
            size,
            bleu,
            paper="X24" if bleu else "-",
            vocab=35628,
            options=tuple(flags.items()),
        )
        for name, depth, size, bleu, flags in X24
    ]


def _compared_rows() -> List[Architecture]:
    """Systems that the papers compare with, and their relatives."""
    return [
        Architecture(
            f"transformer_{name}",
            norm,
            layer_agg,
            *depth,
            size,
            bleu,
            paper=paper,
            vocab=35628 if paper == "X24" else 34040,
            options=tuple(flags.items()),
        )
        for name, norm, layer_agg, depth, size, bleu, paper, flags in COMPARISON
    ]


def _table() -> List[Architecture]:
    rows = [
        Architecture("transformer_prenorm_6l_big_encoder", "pre", "residual", 6, 6, "base", "27.59", "big", "W19"),
        Architecture("transformer_prenorm_6l_big", "pre", "residual", 6, 6, "big", "28.7", paper="W19"),
        Architecture("transformer_postnorm_6l_big", "post", "residual", 6, 6, "big", "28.8", paper="W19"),
        Architecture("transformer_dlcl_12l_big", "pre", "dlcl", 12, 6, "big", "29.17", paper="W19"),
    ]
    depths = (6, 12, 16, 18, 20, 24, 25, 30)
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
    return rows + _depthwise_rows() + _initialised_rows() + _compared_rows()


ARCHITECTURES: Dict[str, Architecture] = {row.name: row for row in _table()}

# the bare model, with fairseq's defaults, for those who set each flag themselves
@register_model_architecture("deep_transformer", "deep_transformer")
def _bare_architecture(args: argparse.Namespace) -> None:
    settle_idle_flags(args, "residual")
    if getattr(args, "encoder_ffn_embed_dim", None) == 0 and getattr(args, "decoder_ffn_embed_dim", None) is None:
        args.decoder_ffn_embed_dim = 2048  # fairseq's default, and not the encoder's
    base_architecture(args)


for _row in ARCHITECTURES.values():
    register_model_architecture("deep_transformer", _row.name)(_row.apply)


def _apply_alias(alias: str, args: argparse.Namespace) -> None:
    name, flags = ALIASES[alias]
    logger.warning("architecture %s is called %s here", alias, name)
    translate_flags(args)
    for flag, value in flags.items():
        if getattr(args, flag, None) is None:
            setattr(args, flag, value)
    ARCHITECTURES[name].apply(args)


for _alias in ALIASES:
    register_model_architecture("deep_transformer", _alias)(functools.partial(_apply_alias, _alias))


def list_archs() -> List[str]:
    """Names of all architectures of this package, as ``--arch`` takes them."""
    return sorted(ARCHITECTURES)


def get_architecture(name: str) -> Architecture:
    """The row called *name*.

    Raises:
        UsageError: there is none; the message names the nearest
    """
    if name not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {name}{nearest(name, ARCHITECTURES)}: see fairseq-deep archs")
    return ARCHITECTURES[name]


def build_architecture(name: str, dictionary: Dictionary, **flags: Any) -> DeepTransformerModel:
    """The model called *name* outside of fairseq's command line, freshly initialised.

    Args:
        name: an architecture
        dictionary: fairseq's dictionary, of both languages
        flags: model flags, with underscores; they beat the presets
    """
    args = argparse.Namespace(arch=name, **flags)
    get_architecture(name).apply(args)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return DeepTransformerModel.build_model(args, task)


def count_parameters(name: str) -> int:
    """Number of parameters of *name* at the paper's vocabulary, with embeddings shared wherever the widths allow."""
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
