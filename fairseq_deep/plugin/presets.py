"""A row of the table of architectures: what it presets, and what of it holds where the user asks for other methods."""

import argparse
from dataclasses import dataclass
from typing import Any

from fairseq.models.transformer import base_architecture
from omegaconf import OmegaConf

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.description import AXES, DECODER, SIDED, SIDES, describe, method_name
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.checks import check_flags
from fairseq_deep.plugin.models.first_look import look_at
from fairseq_deep.plugin.models.unused_flags import settle_unused_flags

from .papers import ORIGINS

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
    bleu: str | None = None
    encoder_size: str | None = None
    paper: str = "-"
    vocab: int = 34040
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def chosen(self) -> dict[str, str]:
        """The method of the row on each axis."""
        options = {**dict(self.options), "layer_agg": self.layer_agg}
        return {axis: options.get(axis, default) for axis, (_, default) in {**SIDED, **DECODER}.items()}

    @property
    def methods(self) -> dict[str, Any]:
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

    def presets(self) -> dict[str, Any]:
        """The flags that the row presets."""
        presets: dict[str, Any] = {"layer_agg": self.layer_agg}
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
        """Fill what *args* leaves open: fairseq's architecture function, which sees the flags before anything else."""
        look_at(args)
        settle_unused_flags(args, self.layer_agg)
        self._follow_user(args)
        for flag, value in self.presets().items():
            if getattr(args, flag, None) is None:
                setattr(args, flag, dict(self.options).get(flag, value))
        self._apply_options(args)
        apply_aggregator_presets(args)
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


def apply_aggregator_presets(args: argparse.Namespace) -> None:
    """Fill what the methods that connect the layers preset in new models."""
    for name in dict.fromkeys(method_name(args, side, "layer_agg") for side in SIDES):
        for option, value in AGGREGATORS.get(name).presets.items():
            flag = f"{AGGREGATORS.prefix(name)}_{option}"
            if getattr(args, flag, None) is None and _fits(args, flag, value):
                setattr(args, flag, value)


def plain(args: Any) -> dict[str, Any]:
    """Flags as a dictionary: fairseq-train has them in a namespace, fairseq-hydra-train in a configuration."""
    return dict(OmegaConf.to_container(args) if OmegaConf.is_config(args) else vars(args))


def args_or(args: argparse.Namespace, flag: str, default: Any) -> Any:
    """The value of *flag*, or *default* where it is not given."""
    value = getattr(args, flag, None)
    return default if value is None else value


def _fits(args: argparse.Namespace, flag: str, value: Any) -> bool:
    """Whether a row's option goes with what the user asked for: it is left out if it alone would be refused."""
    return _refusal(args, {flag: value}) in (None, _refusal(args, {}))


def _refusal(args: argparse.Namespace, more: dict[str, Any]) -> str | None:
    flags = argparse.Namespace(**{**plain(args), **more})
    base_architecture(flags)
    try:
        check_flags(flags, describe(flags))
    except UsageError as error:
        return str(error)
    return None
