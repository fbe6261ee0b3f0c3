"""Rejects flags of fairseq that contradict the chosen methods or each other, before a model is built.

Conflicts within a stack are declared in `RULES`, and the flags of fairseq that a choice excludes in `excluded_flags`.
Each choice is named as on the command line.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from . import layer_options
from .alignment import check_alignment
from .languages import check_languages
from .registry import UsageError
from .stack import MethodConfig, Stack

UNSUPPORTED = (
    "cross_self_attention", "encoder_xformers_att_config", "decoder_xformers_att_config", "base_layers", "char_inputs",
)  # fmt: skip
"""Flags of fairseq's Transformer that require fairseq's own layers."""


class Rule(NamedTuple):
    """Two choices of a stack that do not go together.

    Attributes:
        first, second: names of :func:`choices_of`
        holds: whether they contradict each other in a stack that has both
        reason: property of the second
        fix: for the user
    """

    first: str
    second: str
    holds: Callable[[Stack], bool] = lambda stack: True
    reason: str = ""
    fix: str = "omit or change one of them"


PLAIN = "use --residual plain, or change the other"
RULES = (
    Rule("relative_positions", "attention", lambda stack: not stack.attention.method.relative),
    Rule("positions", "attention", lambda stack: not stack.attention.method.relative),
    Rule("positions", "relative_positions"),
    Rule("kv_heads", "attention", lambda stack: stack.attention.name == "merged", "adds values to all heads"),
    Rule("value_residual", "attention", lambda stack: stack.side == "decoder" and not stack.attention.method.relative,
         "has no self-attention"),
    *(Rule(option, "attention", lambda stack: stack.packs)
      for option in ("qk_norm", "value_residual", "language_norm", "language_transform", "kv_heads")),
    Rule("alignment_layer", "attention", lambda stack: stack.packs, "has no weights of source tokens"),
    Rule("value_residual", "aggregator", lambda stack: stack.layout.num_evaluations > 1,
         "evaluates layers more than once"),
    Rule("ffn", "aggregator", lambda stack: not stack.layout.feed_forward, "replaces feed-forward sub-layers"),
    *(Rule(option, "init", lambda stack: not stack.init.method.layer_norm, "requires no norms")
      for option in ("norm", "qk_norm", "sub_norm", "language_norm", "embedding_norm")),
    Rule("language_norm", "norm"),
    Rule("language_norm", "sub_norm"),
    Rule("language_norm", "residual", lambda stack: stack.residual.name == "peri"),
    Rule("language_norm", "aggregator", lambda stack: not (stack.layout.residual or stack.layout.input_norm),
         "has no norms in its layers"),
    Rule("residual", "aggregator", lambda stack: not stack.layout.residual, "replaces residual connections", PLAIN),
    Rule("residual", "aggregator",
         lambda stack: stack.residual.method.running_sum and not stack.aggregator.method.running_sum,
         "does not add all layers to one sum", PLAIN),
    Rule("residual", "init", lambda stack: stack.init.method.connects or not stack.init.method.layer_norm,
         "has its own residual connections", PLAIN),
    Rule("init", "aggregator", lambda stack: not (stack.layout.residual or stack.init.method.without_residual),
         "replaces residual connections", "use xavier or lipschitz"),
    Rule("init", "aggregator", lambda stack: stack.layout.residual and not stack.init.method.layer_norm, "has norms"),
    Rule("residual", "init", lambda stack: stack.residual.method.shrinks_layers and stack.init.method.shrinks_layers,
         "also scales layers by their depth", "use --deep-init xavier, or --residual plain"),
    Rule("init", "attention", lambda stack: stack.packs and (stack.init.method.connects
                                                             or not stack.init.method.layer_norm),
         "has a packed sequence", "use xavier, ds or lipschitz"),
    Rule("init", "attention", lambda stack: stack.init.method.three_sublayers and stack.parallel_attention,
         "has two sub-layers", "use ds or lipschitz"),
)  # fmt: skip
"""Conflicts within a stack."""


def choices_of(stack: Stack) -> dict[str, str]:
    """Return the choices of *stack* other than the plain ones, by attribute, as on the command line."""
    methods = {"aggregator": ("--layer-agg", "residual"), "residual": ("--residual", "plain"),
               "init": ("--deep-init", "fairseq"), "attention": (f"--{stack.side}-attn", "self"),
               "memory": ("--decoder-memory", "last")}  # fmt: skip
    found = {name: (flag, getattr(stack, name) and getattr(stack, name).name, plain)
             for name, (flag, plain) in methods.items()}  # fmt: skip
    chosen = {name: f"{flag} {value}" for name, (flag, value, plain) in found.items() if value not in (plain, None)}
    others = {"positions": ("--rotary-positions", stack.positions == "rotary"),
              "embedding_norm": ("--layernorm-embedding", stack.embedding_norm),
              "alignment_layer": ("--alignment-layer", stack.alignment_layer is not None)}  # fmt: skip
    chosen |= {name: flag for name, (flag, given) in others.items() if given}
    return chosen | layer_options.choices_of(stack)


def excluded_flags(stack: Stack) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each choice of *stack* that excludes flags of fairseq, the reason, and the flags."""
    side, method, layout = stack.side, stack.aggregator.method, stack.layout
    keep, drop, decodes = f"{side}_layers_to_keep", f"{side}_layerdrop", stack.side == "decoder"
    every, all_layers = "requires every layer", [f"{each}_{name}" for each in ("encoder", "decoder")
                                                 for name in ("layerdrop", "layers_to_keep")]  # fmt: skip
    unsupported = [flag.format(side=side) for flag in method.unsupported_flags]
    yield "aggregator", every, [drop] * (not method.layerdrop) + [keep] * method.needs_every_layer
    yield "aggregator", "", [*unsupported, *(method.decoder_flags if decodes else ())]
    yield "aggregator", "evaluates layers more than once", ["offload_activations"] * (layout.num_evaluations > 1)
    yield "residual", "counts the layers", [keep] * stack.residual.method.counts_layers
    yield "init", "counts the layers", [keep] * stack.init.method.counts_layers
    yield "init", "requires three sub-layers", ["no_cross_attention"] * (decodes and stack.init.method.three_sublayers)
    yield "attention", every, ([keep] + [drop] * decodes) * stack.packs
    yield "attention", "also attends to the source", ["no_cross_attention"] * (stack.parallel_attention or
                                                                               stack.packs and decodes)
    yield "attention", "does not see later positions", ["full_context_alignment"] * (
        decodes and not stack.attention.method.full_context)
    yield "alignment_layer", every, [drop]
    yield "alignment_layer", "requires cross-attention", ["no_cross_attention"]
    yield "memory", f"{every}, and attention to the source", [*all_layers, "no_cross_attention"]
    yield "value_residual", "requires the values of the first layer", [drop, keep]
    yield "positions", "replaces absolute positions", [f"{side}_learned_pos"]


def unused_flags(flags: Any, aggregators: dict[str, MethodConfig]) -> dict[str, Any]:
    """Return the flags of fairseq that have no effect with *aggregators* (by side), with their no-op values.

    Raises:
        UsageError: *flags* have another value of such a flag
    """
    found = {}
    for side, chosen in aggregators.items():
        for name, (value, cure) in chosen.method.unused_flags.items():
            if "{side}" in name or all(name in other.method.unused_flags for other in aggregators.values()):
                flag = name.format(side=side)
                if getattr(flags, flag, None) not in (None, value):
                    raise UsageError(f"{_dashed(flag)} has no effect: --layer-agg {chosen.name} {cure}")
                found[flag] = value
    return found


def check_stacks(stacks: dict[str, Stack], flags: Any = None) -> None:
    """Reject methods, options and flags of fairseq that do not go together.

    Args:
        stacks: complete stacks, by side
        flags: flags of fairseq; None: those that describe *stacks*

    Raises:
        UsageError: one line that names the flags and the fix
    """
    flags = _flags_of(stacks) if flags is None else flags
    for stack, other in zip(stacks.values(), reversed(stacks.values())):
        for chosen in stack.methods:
            chosen.method.check(stack, other, chosen.options)
    for flag in UNSUPPORTED:
        if _given(flags, flag):
            raise UsageError(f"{_dashed(flag)} is not supported by the layers of this package; omit it")
    _check_compile(flags)
    unused_flags(flags, {side: stack.aggregator for side, stack in stacks.items()})
    for stack in stacks.values():
        _check_encoder_only(flags, stack, stacks["encoder"])
        check_languages(stack)
        inner = stack
        while inner is not None:
            _check_stack(flags, inner)
            residual = inner.residual.options.get("inner")
            inner = residual and replace(inner, residual=residual)
    _check_depths(stacks)
    _check_memory(stacks["encoder"], stacks["decoder"])
    check_alignment(flags)


def _flags_of(stacks: dict[str, Stack]) -> Namespace:
    encoder, decoder = stacks["encoder"], stacks["decoder"]
    return Namespace(
        encoder_layerdrop=encoder.layerdrop,
        decoder_layerdrop=decoder.layerdrop,
        no_cross_attention=not decoder.cross_attention,
        no_decoder_final_norm=not decoder.final_norm,
        offload_activations=encoder.offload or decoder.offload,
    )


def _check_stack(flags: Any, stack: Stack) -> None:
    """Apply `RULES`, `excluded_flags` and the methods' norm placements."""
    chosen, side = choices_of(stack), stack.side
    for rule in RULES:
        if rule.first in chosen and rule.second in chosen and rule.holds(stack):
            raise _refusal(chosen[rule.first], chosen[rule.second], rule.reason, side, rule.fix)
    for name, reason, excluded in excluded_flags(stack):
        for flag in excluded if name in chosen else ():
            if _given(flags, flag):
                raise _refusal(_dashed(flag), chosen[name], reason, side)
    norm = "pre" if stack.pre_norm else "post"
    for name in ("residual", "init") if stack.layout.residual else ():
        norms = getattr(stack, name).method.norms
        if name in chosen and norm not in norms:
            other = f"use a transformer_{norms[0]}norm architecture, or another {chosen[name].split()[0]}"
            raise UsageError(f"{chosen[name]} requires {norms[0]}-norm stacks ({side}): {other}")


def _refusal(first: str, second: str, reason: str, side: str, fix: str = "omit or change one of them") -> UsageError:
    which = f", which {reason}" if reason else ""
    return UsageError(f"{first} is not supported with {second}{which} ({side}): {fix}")


def _check_encoder_only(flags: Any, stack: Stack, encoder: Stack) -> None:
    name, method = stack.aggregator.name, stack.aggregator.method
    if method.encoder_only and stack.side == "decoder" and (
        _given(flags, "decoder_layer_agg") or encoder.aggregator.method is not method
    ):
        raise UsageError(
            f"--layer-agg {name} requires an encoder, and --decoder-layer-agg {name} is not supported: "
            f"use --encoder-layer-agg {name}, and another --decoder-layer-agg such as residual"
        )


def _check_depths(stacks: dict[str, Stack]) -> None:
    """Reject empty stacks with choices that need layers, and shared values without a second layer."""
    for stack in stacks.values():
        chosen = choices_of(stack)
        needs = {"init": stack.init.method.touches, "attention": stack.packs and stack.side == "decoder",
                 "memory": True}  # fmt: skip
        owner = next((chosen[name] for name, needed in needs.items() if needed and name in chosen), None)
        empty = next((each.side for each in stacks.values() if each.layers < 1), None)
        if owner and empty:
            raise UsageError(f"{owner} requires layers: use --{empty}-layers 1 or more")
        if stack.value_residual and max(stack.encoder_layers, stack.decoder_layers) < 2:
            raise UsageError("--value-residual has no effect on stacks of one layer: omit it, or add layers")


def _check_memory(encoder: Stack, decoder: Stack) -> None:
    name = decoder.memory.name
    if name == "last" or decoder.memory.method.normalises or not encoder.pre_norm or encoder.layout.final_norm:
        return
    raise UsageError(
        f"--decoder-memory {name} requires the final norm of a pre-norm encoder, which --layer-agg "
        f"{encoder.aggregator.name} removes: use a postnorm architecture, or --decoder-memory last"
    )


def check_sizes(args: Any, task: Any) -> None:
    """Reject sizes that contradict each other or the dictionaries of *task*.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    interval = getattr(args, "log_depth_interval", None)
    if interval is not None and interval < 1:
        raise UsageError(f"--log-depth-interval {interval} must be at least 1: change or omit it")
    if getattr(args, "share_all_embeddings", False):
        if task.source_dictionary != task.target_dictionary:
            raise UsageError(
                "--share-all-embeddings requires one dictionary for both languages: "
                "binarise with fairseq-preprocess --joined-dictionary, or omit the flag"
            )
        if getattr(args, "encoder_embed_dim", None) != getattr(args, "decoder_embed_dim", None):
            raise UsageError(
                "--share-all-embeddings requires equal widths: make --encoder-embed-dim and --decoder-embed-dim equal, "
                "or use --share-decoder-input-output-embed"
            )
    _check_widths(args)


def _check_widths(args: Any) -> None:
    width, output = getattr(args, "decoder_embed_dim", None), getattr(args, "decoder_output_dim", None)
    shared = _given(args, "share_all_embeddings") or _given(args, "share_decoder_input_output_embed")
    if shared and width and output and output != width and not _given(args, "adaptive_softmax_cutoff"):
        raise UsageError(
            f"--decoder-output-dim {output} must be the width of the shared embeddings, {width}: omit it, "
            "or do not share embeddings"
        )
    if _given(args, "tie_adaptive_weights") and _given(args, "adaptive_softmax_cutoff"):
        raise UsageError("--tie-adaptive-weights requires adaptive inputs, which these models lack: omit it")


def _given(flags: Any, name: str) -> bool:
    return bool(getattr(flags, name, None))


def _dashed(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _check_compile(flags: Any) -> None:
    if not _given(flags, "compile"):
        return
    for flag in ("quant_noise_pq", "quant_noise_scalar"):
        if _given(flags, flag):
            raise UsageError(f"{_dashed(flag)} changes weights in Python, which --compile does not support: omit one")
    if _given(flags, "offload_activations"):
        raise UsageError("--offload-activations is not supported with --compile: use --checkpoint-activations instead")
