"""Converts flags to the descriptions of both stacks. No other module reads the flags of methods."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from fairseq_deep.core import layer_options
from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.core.attention import DECODER_ATTENTIONS, ENCODER_ATTENTIONS
from fairseq_deep.core.checks import check_stacks
from fairseq_deep.core.inits import INITS
from fairseq_deep.core.memories import MEMORIES
from fairseq_deep.core.registry import Registry, UsageError, flags_owner
from fairseq_deep.core.residuals import RESIDUALS
from fairseq_deep.core.stack import FLAGS, MethodConfig, Stack, flag_of

SIDES = ("encoder", "decoder")
# the axes of both stacks, each with its default method
SIDED = {"layer_agg": (AGGREGATORS, "residual"), "deep_init": (INITS, "fairseq"), "residual": (RESIDUALS, "plain")}
ENCODER = {"encoder_attn": (ENCODER_ATTENTIONS, "self")}
DECODER = {"decoder_attn": (DECODER_ATTENTIONS, "self"), "decoder_memory": (MEMORIES, "last")}
AXES = {**SIDED, **ENCODER, **DECODER}
REGISTRIES = [registry for registry, _ in AXES.values()]
ATTRIBUTES = {"layer_agg": "aggregator", "deep_init": "init", "residual": "residual", "encoder_attn": "attention",
              "decoder_attn": "attention", "decoder_memory": "memory"}  # fmt: skip
"""The attribute of :class:`Stack` of each axis."""
DEFAULTS = {"dim": 512, "memory_dim": 512, "ffn_dim": 2048, "heads": 8, "dropout": 0.1, "pre_norm": False}
"""fairseq's defaults of attributes, where :class:`Stack` has others."""
AXES_OF = {"encoder": {**SIDED, **ENCODER}, "decoder": {**SIDED, **DECODER}}


def method_name(flags: Any, side: str, axis: str, default: str | None = None) -> str:
    """Return the method of *side* on *axis*: by the flag of the side, the flag of both sides, or *default*."""
    return getattr(flags, f"{side}_{axis}", None) or getattr(flags, axis, None) or default or AXES[axis][1]


def add_args(parser) -> None:
    """Add the flags that choose methods, and the flags of the methods, without defaults."""
    texts = {"layer_agg": "connections between the layers of {}", "deep_init": "initialisation of {}",
             "residual": "residual connections of {}"}  # fmt: skip
    for axis, (registry, _) in SIDED.items():
        for prefix, stack in (("", "both stacks"), ("encoder-", "the encoder"), ("decoder-", "the decoder")):
            parser.add_argument(registry.kind.replace("--", f"--{prefix}"), metavar="NAME", type=registry.check,
                                help=f"{texts[axis].format(stack)}: {', '.join(registry.names())}")
    texts_of_one = {
        ENCODER_ATTENTIONS: "attention of the encoder", DECODER_ATTENTIONS: "attentions of the decoder",
        MEMORIES: "memories that decoder layers attend to",
    }  # fmt: skip
    for registry, text in texts_of_one.items():
        parser.add_argument(registry.kind, metavar="NAME", type=registry.check,
                            help=f"{text}: {', '.join(registry.names())}")
    for registry in REGISTRIES:
        methods = map(registry.get, registry.names())
        for method in {flags_owner(method): method for method in methods}.values():
            method.add_args(parser)
    layer_options.add_args(parser)


def describe(flags: Any) -> dict[str, Stack]:
    """Return the stacks that *flags* describe, by side.

    Args:
        flags: a namespace of model flags with the architecture's defaults; fairseq's defaults apply to missing flags

    Raises:
        UsageError: a method, an option or a flag of fairseq is unknown, or conflicts with another
    """
    stacks = {side: _choose_methods(flags, _numbers(flags, side)) for side in SIDES}
    _check_used(flags, stacks)
    check_stacks(stacks, flags)
    return stacks


def complete(stack: Stack) -> Stack:
    """Return *stack* with the plain method on each axis without a method.

    Raises:
        UsageError: a method belongs to another axis
    """
    plain = {ATTRIBUTES[axis]: pair for axis, pair in AXES_OF[stack.side].items()}
    for axis, (registry, _) in plain.items():
        chosen = getattr(stack, axis)
        if chosen is not None and any(each.knows(chosen.method) for each in REGISTRIES if each is not registry):
            raise UsageError(f"{axis} must be a method of {registry.kind} ({stack.side}: {chosen.name}); "
                             f"choose from {', '.join(registry.names())}")  # fmt: skip
    chosen = {axis: _with_inner(getattr(stack, axis) or MethodConfig(name, registry.get(name)), registry)
              for axis, (registry, name) in plain.items()}  # fmt: skip
    return replace(stack, **chosen)


def _with_inner(config: MethodConfig, registry: Registry) -> MethodConfig:
    """Return *config* with its inner method, if it has one."""
    inner = config.method.inner_method(config.options)
    if inner is None or "inner" in config.options:
        return config
    return config.with_inner(MethodConfig(inner, registry.get(inner)))


def _numbers(flags: Any, side: str) -> Stack:
    """Return the stack that fairseq's own flags describe, without methods."""

    def get(name: str, default: Any = None) -> Any:
        value = getattr(flags, name, None)
        return default if value is None else value

    def depth(of: str) -> int:
        kept = get(f"{of}_layers_to_keep")
        return len(kept.split(",")) if kept else get(f"{of}_layers", 6)

    offload = bool(get("offload_activations", False))
    absolute = "none" if get("no_token_positional_embeddings") else "learned" if get(f"{side}_learned_pos") else None
    others = {"layers", "other_layers", *ATTRIBUTES.values()}
    if side == "encoder":
        others |= {"output_dim", "alignment_layer", "alignment_heads", "final_norm"}
    defaults = {**vars(Stack), **DEFAULTS}
    values = {name: get(flag_of(name, side), defaults.get(name)) for name in FLAGS if name not in others}
    # relu_dropout is the name in models of old fairseq versions
    values["activation_dropout"] = values["activation_dropout"] or get("relu_dropout", 0)
    values.update({name: bool(values[name]) for name in ("pre_norm", "embedding_norm")})
    values.update({name: not get(FLAGS[name], False) for name in ("scale_embedding", "cross_attention", "final_norm")
                   if name in values})  # fmt: skip
    tied = get("share_all_embeddings") or get("share_decoder_input_output_embed")
    return Stack(
        side=side,
        layers=depth(side),
        other_layers=depth(SIDES[1 - SIDES.index(side)]),
        positions="rotary" if get("rotary_positions") else absolute or "sinusoidal",
        tied_output=side == "decoder" and bool(tied),
        recompute=offload or bool(get("checkpoint_activations", False)),
        offload=offload,
        **values,
    )


def _choose_methods(flags: Any, stack: Stack) -> Stack:
    side = stack.side
    axes = {axis: registry for axis, (registry, _) in AXES_OF[side].items()}
    return replace(stack, **{ATTRIBUTES[axis]: registry.choose(flags, method_name(flags, side, axis), side)
                             for axis, registry in axes.items()})  # fmt: skip


def _check_used(flags: Any, stacks: dict[str, Stack]) -> None:
    """Reject options that have no effect: neither stack, or not the stack of the flag, uses the method."""
    used: set[tuple[str, str]] = set()  # the two attentions of a method may share flags
    for side, stack in stacks.items():
        for choice in stack.methods:
            while choice is not None:
                kind = next(registry for registry in REGISTRIES if registry.knows(choice.method))
                used |= {(kind.prefix(choice.name), place) for place in ("", side)}
                choice = choice.options.get("inner")
    for registry in REGISTRIES:
        for name, side in itertools.product(registry.names(), ("", *SIDES)):
            prefix = registry.prefix(name)
            options = {} if (prefix, side) in used else registry.options(flags, name, side)
            for option, value in options.items():
                start = f"--{side}-" if side else "--"
                flag = f"{start}{prefix}_{'no_' if value is False else ''}{option}".replace("_", "-")
                kind = registry.kind.replace("--", start)
                names = " or ".join(n for n in registry.names() if registry.prefix(n) == prefix)
                raise UsageError(f"{flag} has no effect without {kind} {names}: add that, or omit it")
