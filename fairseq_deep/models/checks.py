"""Refuse flags that contradict each other, before anything is built."""

from typing import Any, Iterable

from ..aggregators import AGGREGATORS
from ..attention import DECODER_ATTENTIONS
from ..inits import INITS
from ..layers import decoder_attention
from ..registry import Registry, UsageError
from .building import SIDES, aggregator_name, attention_only, flag_prefix, init_name, method_options


def check_options(cfg) -> None:
    """Refuse what an aggregator cannot do, before fairseq builds anything.

    Raises:
        UsageError: an option of an aggregator that neither stack uses, so that it would silently do nothing, or a flag
            that means nothing, or cannot be, in a stack with its aggregator
    """
    sides = {side: aggregator_name(cfg, side) for side in SIDES}
    inits = {side: init_name(cfg, side) for side in SIDES}
    _check_unused(cfg, AGGREGATORS, sides.values())
    _check_unused(cfg, INITS, inits.values())
    if getattr(cfg, "encoder_xformers_att_config", None):
        raise UsageError("--encoder-xformers-att-config is not made for the layers of this package: leave it out")
    for option in AGGREGATORS.get(sides["encoder"]).decoder_options:
        prefix = flag_prefix(AGGREGATORS, sides["encoder"])
        flag = f"{prefix}_{option}"
        if flag_prefix(AGGREGATORS, sides["decoder"]) != prefix and getattr(cfg, flag, None):
            raise UsageError(
                f"--{flag.replace('_', '-')} is about the decoder, whose --layer-agg is {sides['decoder']}: "
                "leave it out"
            )
    _check_decoder_attention(cfg, sides["decoder"])
    for side, name in sides.items():
        flags = [f"{side}_layerdrop", f"{side}_layers_to_keep"] + (["base_layers"] if side == "decoder" else [])
        for flag in flags if AGGREGATORS.get(name).needs_every_layer else []:
            if getattr(cfg, flag, None):
                raise UsageError(
                    f"--layer-agg {name} needs each layer of the {side} at its place: "
                    f"leave out --{flag.replace('_', '-')}, or use --{side}-layer-agg residual"
                )
        _check_init(cfg, side, name, inits[side])
        if AGGREGATORS.get(name).attention_only:
            _check_attention_only(cfg, side, name)
        elif getattr(cfg, "relative_positions", None) is not None:
            raise UsageError(
                f"--relative-positions is not made for the {side}'s --layer-agg {name}: "
                "leave it out, or use --layer-agg lstm"
            )


def _check_attention_only(cfg, side: str, name: str) -> None:
    """Refuse what only the layers that the aggregator *name* replaces can do."""
    flags = ["quant_noise_pq", "quant_noise_scalar", f"{side}_xformers_att_config"]
    flags += ["cross_self_attention", "no_cross_attention", "no_decoder_final_norm"] if side == "decoder" else []
    for flag in flags:
        if getattr(cfg, flag, None):
            raise UsageError(
                f"--{flag.replace('_', '-')} is not made for the layers of --layer-agg {name}: "
                f"leave it out, or use --{side}-layer-agg residual"
            )
    relative = getattr(cfg, "relative_positions", None)
    if relative is not None and relative < 1:
        raise UsageError(f"--relative-positions {relative} leaves no distance: use 1 or more, or leave it out")


def _check_decoder_attention(cfg, layer_agg: str) -> None:
    """Refuse what is about attentions that the decoder has not."""
    name = getattr(cfg, "decoder_attn", None) or "self"
    kind = DECODER_ATTENTIONS.get(name)
    if kind.positions != "average" and getattr(cfg, "average_ffn", False):
        raise UsageError("--average-ffn does nothing without --decoder-attn average or merged-average: leave it out")
    if name == "self":
        return
    refused = ["cross_self_attention", "decoder_xformers_att_config"]
    refused += ["no_cross_attention", "lstm_merge", "lstm_attn_residual"] if kind.parallel else []
    refused += ["relative_positions"] if kind.positions != "self" else []
    for flag in refused:
        if getattr(cfg, flag, None):
            raise UsageError(f"--{flag.replace('_', '-')} is not made for --decoder-attn {name}: leave one of them out")
    widths = [getattr(cfg, f"{side}_embed_dim", None) for side in SIDES]
    if kind.positions is None and None not in widths and widths[0] != widths[1]:
        raise UsageError(
            f"--decoder-attn {name} has one matrix for the values of both sides: make --encoder-embed-dim and "
            f"--decoder-embed-dim equal ({widths[0]} and {widths[1]}), or use merged-average"
        )
    if getattr(cfg, "average_ffn", False) and AGGREGATORS.get(layer_agg).attention_only:
        raise UsageError(f"--average-ffn needs a feed-forward width: leave it out with --layer-agg {layer_agg}")


def _check_unused(cfg, registry: Registry, chosen: Iterable[str]) -> None:
    """Refuse options of methods that neither stack uses."""
    used = {flag_prefix(registry, name) for name in chosen}
    for name in registry.names():
        prefix = flag_prefix(registry, name)
        options = {} if prefix in used else method_options(cfg, registry, name)
        given = [option for option, value in options.items() if value is not False]
        if given:
            flag = f"{prefix}_{given[0]}".replace("_", "-")
            raise UsageError(
                f"--{flag} does nothing without {registry.kind} {name}: add that, or leave the option out"
            )


def _check_init(cfg, side: str, layer_agg: str, name: str) -> None:
    """Refuse an initialisation that is not made for the stack."""
    init = INITS.get(name)
    norm = "pre" if getattr(cfg, f"{side}_normalize_before", False) else "post"
    if AGGREGATORS.get(layer_agg).attention_only:
        if not init.without_residual:
            raise UsageError(
                f"--deep-init {name} is about residual connections, which --layer-agg {layer_agg} replaces ({side}): "
                "use xavier or lipschitz"
            )
    elif "none" in init.norms and layer_agg != "residual":
        raise UsageError(
            f"--deep-init {name} is made for stacks without norms: use --{side}-layer-agg residual, not {layer_agg}"
        )
    elif norm == "pre" and "pre" not in init.norms:
        kind = "stacks without norms" if "none" in init.norms else "post-norm"
        raise UsageError(
            f"--deep-init {name} is made for {kind} ({side}): use a transformer_postnorm architecture, "
            f"without --{side}-normalize-before"
        )
    if "none" in init.norms and getattr(cfg, "layernorm_embedding", False):
        raise UsageError(f"--layernorm-embedding adds a norm where --deep-init {name} does without: leave it out")
    merged = decoder_attention(cfg).parallel
    if init.three_sublayers and side == "decoder" and (merged or getattr(cfg, "no_cross_attention", False)):
        flag = f"--decoder-attn {cfg.decoder_attn}" if merged else "--no-cross-attention"
        raise UsageError(f"--deep-init {name} counts three sub-layers, {flag} has two: use ds or lipschitz")
    for flag in ("cross_self_attention", "decoder_xformers_att_config") if init.touches and side == "decoder" else ():
        if getattr(cfg, flag, None):
            raise UsageError(f"--{flag.replace('_', '-')} has no rule in --deep-init {name}: leave one of them out")
    if init.touches and side == "decoder" and getattr(cfg, "base_layers", 0):
        raise UsageError(f"--base-layers has no rule in --deep-init {name}: leave one of them out")
    if init.counts_layers and getattr(cfg, f"{side}_layers_to_keep", None):
        raise UsageError(f"--{side}-layers-to-keep changes the depth that --deep-init {name} counts: leave it out")
    for stack in SIDES if init.touches else ():
        if getattr(cfg, f"{stack}_layers", None) == 0:
            raise UsageError(f"--{stack}-layers 0 leaves --deep-init {name} without a depth: use 1 or more")


def drop_feed_forward(args, layer_agg: str) -> None:
    """Set what means nothing in a stack of attention layers to a value that says so, before presets fill *args*.

    It is called again on the flags of a checkpoint, and then finds its own values.

    Args:
        args: flags as the user gave them
        layer_agg: the aggregator if no flag names one

    Raises:
        UsageError: the user gave one of those flags
    """
    alone = [side for side in SIDES if attention_only(args, side, layer_agg)]
    for side in alone:
        name = aggregator_name(args, side, layer_agg)
        _settle(args, f"{side}_ffn_embed_dim", 0, f"{name} has no feed-forward sub-layer: use --lstm-hidden instead")
        _settle(args, f"{side}_normalize_before", False, f"{name} has its own norms: use --lstm-final-norm for more")
    if len(alone) == len(SIDES):
        name = aggregator_name(args, "encoder", layer_agg)
        _settle(args, "activation_fn", "gelu", f"{name} has its own: use --lstm-ffn and --lstm-glu")


def _settle(args, flag: str, value: Any, cure: str) -> None:
    if getattr(args, flag, None) not in (None, value):
        raise UsageError(f"--{flag.replace('_', '-')} does nothing: --layer-agg {cure}")
    setattr(args, flag, value)
