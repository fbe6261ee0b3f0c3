"""Presets of an architecture, and their interaction with methods that the user selects."""

import argparse
import logging
from dataclasses import dataclass
from typing import Any

from fairseq.models.transformer import base_architecture
from omegaconf import OmegaConf

from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.checks import unused_flags
from fairseq_deep.core.description import AXES, SIDES, describe, method_name
from fairseq_deep.core.inits import INITS
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import MethodConfig
from fairseq_deep.plugin.models.first_look import look_at

from .papers import ORIGINS

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
    """One row of the table of architectures.

    Attributes:
        name: the value of ``--arch``
        norm: "pre", "post", or "-" if the aggregator has its own norms
        layer_agg: the aggregator, which connects the layers
        encoder_layers, decoder_layers: depth
        size: a key of ``SIZES``, for the decoder and, unless *encoder_size* is set, the encoder
        bleu: the entry in the paper's table (a score, or "failed"), or None
        encoder_size: a key of ``SIZES`` if the encoder has another size
        paper: key of the paper that has this system, or "-"
        vocab: the paper's vocabulary size, used to count parameters
        options: further flags and their values, each after the flags that it requires. Options of a method that the
            user replaces are dropped, and options that conflict with another selected aggregator or attention
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
        """The row's method on each axis."""
        options = {**dict(self.options), "layer_agg": self.layer_agg}
        return {axis: options.get(axis, default) for axis, (_, default) in AXES.items()}

    @property
    def methods(self) -> dict[str, Any]:
        """The classes of the row's methods other than the defaults, by name."""
        return {name: AXES[axis][0].get(name) for axis, name in self.chosen.items() if name != AXES[axis][1]}

    @property
    def family(self) -> str:
        """The row's methods, or for a plain stack its norm placement."""
        names = [name for name in self.methods if name not in ("xavier",)]
        return "+".join(names) or {"pre": "pre-norm", "post": "post-norm"}[self.norm]

    @property
    def origin(self) -> str:
        """The first author of the system, with the year."""
        name = self.name[len("transformer_") :]
        papers = [method.paper for key, method in self.methods.items() if method.paper and key != "xavier"]
        plain = "Wang 2019" if self.norm == "pre" else "Vaswani 2017"
        return ORIGINS.get(name) or ORIGINS.get(name.partition("_")[0]) or ", ".join(dict.fromkeys(papers)) or plain

    def presets(self) -> dict[str, Any]:
        """Return the flags that the row presets."""
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
        # W19, Section 4.2: the pre-norm systems add dropout on attention and feed-forward. X24 does not mention it, but
        # the public settings of its authors' earlier paper (X20) also have it.
        presets["attention_dropout"] = presets["activation_dropout"] = 0.0 if self.norm == "post" else 0.1
        return presets

    def apply(self, args: argparse.Namespace) -> None:
        """Set the flags that *args* does not have; this is fairseq's architecture function."""
        new = look_at(args)
        settle_unused_flags(args, self.layer_agg)
        self._follow_user(args)
        for flag, value in self.presets().items():
            _fill(args, flag, dict(self.options).get(flag, value))
        dropped = self._apply_options(args)
        if new:
            apply_aggregator_presets(args)
            for flag in dropped:
                logger.info(f"{self.name}: its {flag} is not used, because it conflicts with another flag")
        base_architecture(args)

    def _apply_options(self, args: argparse.Namespace) -> list[str]:
        """Set the row's options; with another aggregator or attention, only options that do not conflict with it.

        Returns:
            the flags of the options that conflict, with their values
        """
        names = ("layer_agg", "encoder_attn", "decoder_attn")
        axes = [(side, axis, self.chosen[axis]) for side in SIDES for axis in names]
        other = any(method_name(args, side, axis, own) != own for side, axis, own in axes)
        dropped = []
        for flag, value in self.options:
            if self._is_asked_for(args, flag) and not _fill(args, flag, value, check=other or flag in YIELDING):
                dropped.append(f"--{flag.replace('_', '-')} {value}")
        return dropped

    def _is_asked_for(self, args: argparse.Namespace, flag: str) -> bool:
        """Return whether *flag* belongs to no method of the row, or to a method that *args* select."""
        side, _, axis = flag.partition("_")
        if side in SIDES and axis in AXES and getattr(args, axis, None) is not None:
            return False  # the user has chosen for both stacks
        for axis, own in self.chosen.items():
            registry, names = AXES[axis][0], _names(args, axis)
            prefix = f"{registry.prefix(own)}_"
            if flag.startswith(prefix):
                of_decoder = flag[len(prefix) :] in registry.get(own).decoder_options
                return own in (names[1:] if of_decoder else names)
        # if an aggregator builds the layers, relative positions in the options are meant for these layers only
        whole = AGGREGATORS.get(self.layer_agg).layout("encoder", {}).residual
        return whole or not flag.startswith("relative_") or set(_names(args, "layer_agg")) == {self.layer_agg}

    @staticmethod
    def _follow_user(args: argparse.Namespace) -> None:
        """Copy encoder widths to the decoder, and an old dropout flag to its new name, as in fairseq."""
        for flag, follower in (
            ("encoder_embed_dim", "decoder_embed_dim"),
            ("encoder_ffn_embed_dim", "decoder_ffn_embed_dim"),
            ("relu_dropout", "activation_dropout"),
        ):
            value = getattr(args, flag, None)
            nothing = value is None or (value == 0 and "ffn" in flag)  # 0: an encoder without feed-forward sub-layers
            if not nothing:
                _fill(args, follower, value)


def settle_unused_flags(args: Any, layer_agg: str) -> None:
    """Set the flags that have no effect with an aggregator (``unused_flags``), before presets fill *args*.

    Args:
        args: flags as the user gave them
        layer_agg: the default aggregator

    Raises:
        UsageError: the user gave a flag without effect
    """
    names = {side: method_name(args, side, "layer_agg", layer_agg) for side in SIDES}
    chosen = {side: MethodConfig(name, AGGREGATORS.get(name)) for side, name in names.items()}
    for flag, value in unused_flags(args, chosen).items():
        setattr(args, flag, value)


def apply_aggregator_presets(args: argparse.Namespace) -> None:
    """Set the options that the aggregators preset for new models."""
    for side, name in zip(SIDES, _names(args, "layer_agg")):
        method = AGGREGATORS.get(name)
        for option, value in method.presets.items():
            if side == "decoder" or option not in method.decoder_options:
                _fill(args, f"{AGGREGATORS.prefix(name)}_{option}", value, check=True)


def _fill(args: argparse.Namespace, flag: str, value: Any, check: bool = False) -> bool:
    """Set *flag* to its preset *value*, unless *args* have it or, with *check*, flags that conflict with it.

    Returns:
        whether *args* have the flag now
    """
    if getattr(args, flag, None) is None and not (check and _conflicts(args, flag, value)):
        setattr(args, flag, value)
    return getattr(args, flag, None) is not None


def _conflicts(args: argparse.Namespace, flag: str, value: Any) -> bool:
    """Return whether the checks of a model reject the preset *value* of *flag* because of other flags.

    Methods do not yield: their conflicts are reported. The exception is an initialisation of residual connections that
    the user's aggregator replaces.
    """
    if flag in AXES:
        return flag == "deep_init" and _is_replaced(args, value)
    if flag == "rotary_positions" and getattr(args, "no_token_positional_embeddings", None):
        return True  # accepted by the checks, in checkpoints
    problem = _find_problem(args, **{flag: value})
    return problem != "" and problem != _find_problem(args)


def _find_problem(args: argparse.Namespace, **more: Any) -> str:
    """Return why the checks reject a model with the flags *args* and *more*; "" if they accept it."""
    given = OmegaConf.to_container(args, resolve=True) if OmegaConf.is_config(args) else vars(args)
    flags = argparse.Namespace(**{**given, **more})
    try:
        describe(flags)
    except UsageError as error:
        return error.message
    return ""


def _names(args: argparse.Namespace, axis: str) -> list[str]:
    """Return the names of the methods that *args* select on *axis* for encoder and decoder."""
    return [method_name(args, side, axis) for side in SIDES]


def _is_replaced(args: argparse.Namespace, init: str) -> bool:
    """Return whether *init* requires residual connections and would initialise a stack without them."""
    layouts = {side: AGGREGATORS.get(method_name(args, side, "layer_agg")).layout(side, {}) for side in SIDES}
    filled = [layouts[side] for side in SIDES if method_name(args, side, "deep_init", init) == init]
    return not INITS.get(init).without_residual and not all(layout.residual for layout in filled)


YIELDING = ("rotary_positions", "norm", "ffn")
"""Options of rows that yield to any conflicting flag, not only to another aggregator or attention: no flag undoes the
first one."""
