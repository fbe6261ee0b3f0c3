"""Rejects flags of fairseq that contradict the chosen methods or each other, before a model is built."""

from typing import Any

from .alignment import check_alignment
from .languages import check_languages
from .layer_options import check_layer_options
from .registry import UsageError
from .stack import MethodConfig, Stack

UNSUPPORTED = (
    "cross_self_attention", "encoder_xformers_att_config", "decoder_xformers_att_config", "base_layers", "char_inputs",
)  # fmt: skip
"""Flags of fairseq's Transformer that require fairseq's own layers."""


def check_flags(flags: Any, stacks: dict[str, Stack]) -> None:
    """Reject flags of fairseq that the methods of *stacks* do not support.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    for flag in UNSUPPORTED:
        if _given(flags, flag):
            raise UsageError(f"{_dashed(flag)} is not supported by the layers of this package; omit it")
    _check_compile(flags)
    decoder = stacks["decoder"]
    for stack in stacks.values():
        _check_aggregator(flags, stack, stacks["encoder"])
        check_layer_options(flags, stack)
        check_languages(stack)
        _check_residual(flags, stack, stack.residual)
        _check_init(flags, stack)
    _check_attention(flags, decoder)
    _check_packed(flags, stacks)
    _check_memory(flags, stacks["encoder"], decoder)
    check_alignment(flags, decoder)


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


def _check_aggregator(flags: Any, stack: Stack, encoder: Stack) -> None:
    name, method, side = stack.aggregator.name, stack.aggregator.method, stack.side
    needed = [] if method.layerdrop else [f"{side}_layerdrop"]
    if method.needs_every_layer:
        needed.append(f"{side}_layers_to_keep")
    for flag in needed:
        if _given(flags, flag):
            raise UsageError(
                f"--layer-agg {name} requires every layer of the {side}: "
                f"omit {_dashed(flag)}, or use --{side}-layer-agg residual"
            )
    if method.encoder_only and side == "decoder" and (
        _given(flags, "decoder_layer_agg") or encoder.aggregator.method is not method
    ):
        raise UsageError(
            f"--layer-agg {name} requires an encoder, and --decoder-layer-agg {name} is not supported: "
            f"use --encoder-layer-agg {name}, and another --decoder-layer-agg such as residual"
        )
    unsupported = [flag.format(side=side) for flag in method.unsupported_flags]
    for flag in unsupported + list(method.decoder_flags if side == "decoder" else ()):
        if _given(flags, flag):
            raise UsageError(
                f"{_dashed(flag)} is not supported with the layers of --layer-agg {name}: "
                f"omit it, or use --{side}-layer-agg residual"
            )
    if stack.layout.num_evaluations > 1 and _given(flags, "offload_activations"):
        raise UsageError(
            f"--offload-activations is not supported with layers that --layer-agg {name} evaluates more than once: "
            "use --checkpoint-activations"
        )


def _check_residual(flags: Any, stack: Stack, residual: MethodConfig | None) -> None:
    """Reject stacks that *residual*, or its inner connection, does not support."""
    if residual is None or residual.name == "plain":
        return
    name, method, norm = residual.name, residual.method, "pre" if stack.pre_norm else "post"
    if method.counts_layers and _given(flags, f"{stack.side}_layers_to_keep"):
        raise UsageError(
            f"--{stack.side}-layers-to-keep renumbers the layers, which --residual {name} counts: omit it"
        )
    if not stack.layout.residual:
        raise UsageError(
            f"--residual {name} requires residual connections, which --layer-agg {stack.aggregator.name} replaces "
            f"({stack.side}): use --residual plain, or another --layer-agg"
        )
    if method.running_sum and not stack.aggregator.method.running_sum:
        raise UsageError(
            f"--residual {name} requires layers that all add to one sum ({stack.side}: --layer-agg "
            f"{stack.aggregator.name}): use --{stack.side}-layer-agg residual, or --{stack.side}-residual plain"
        )
    if stack.init.method.connects or not stack.init.method.layer_norm:
        has = "has its own residual connections" if stack.init.method.connects else "requires plain connections"
        raise UsageError(
            f"--deep-init {stack.init.name} {has} ({stack.side}): use --residual plain, or --deep-init xavier"
        )
    if norm not in method.norms:
        other = "transformer_postnorm" if norm == "pre" else "transformer_prenorm"
        raise UsageError(
            f"--residual {name} requires {method.norms[0]}-norm stacks ({stack.side}): "
            f"use a {other} architecture, or another --residual"
        )
    _check_residual(flags, stack, residual.options.get("inner"))


def _check_attention(flags: Any, stack: Stack) -> None:
    """Reject flags for attentions that the decoder lacks."""
    if stack.parallel_attention and _given(flags, "no_cross_attention"):
        name = stack.attention.name
        raise UsageError(f"--no-cross-attention is not supported with --decoder-attn {name}: omit one of them")


def _check_packed(flags: Any, stacks: dict[str, Stack]) -> None:
    """Reject flags that remove layers from stacks with a packed sequence."""
    removes = {"encoder": ["encoder_layers_to_keep"], "decoder": ["decoder_layers_to_keep", "decoder_layerdrop"]}
    for side, stack in stacks.items():
        for flag in removes[side] if stack.packs else []:
            if _given(flags, flag):
                raise UsageError(
                    f"{_dashed(flag)} is not supported with --{side}-attn {stack.attention.name}, which requires every "
                    "layer: omit one of them"
                )
        empty = [each.side for each in stacks.values() if each.layers < 1]
        if stack.packs and side == "decoder" and empty:
            raise UsageError(
                f"--decoder-attn {stack.attention.name} requires layers in both stacks: "
                f"use --{empty[0]}-layers 1 or more"
            )


def _check_memory(flags: Any, encoder: Stack, decoder: Stack) -> None:
    name = decoder.memory.name
    if name == "last":
        return
    for flag in ("encoder_layerdrop", "encoder_layers_to_keep", "decoder_layerdrop", "decoder_layers_to_keep",
                 "no_cross_attention"):  # fmt: skip
        if _given(flags, flag):
            raise UsageError(
                f"--decoder-memory {name} requires every layer, and attention to the source: "
                f"omit {_dashed(flag)}, or use --decoder-memory last"
            )
    if encoder.pre_norm and not encoder.layout.final_norm and not decoder.memory.method.normalises:
        raise UsageError(
            f"--decoder-memory {name} requires the final norm of a pre-norm encoder, which --layer-agg "
            f"{encoder.aggregator.name} removes: use a postnorm architecture, or --decoder-memory last"
        )
    for stack in (encoder, decoder):
        if stack.layers < 1:
            raise UsageError(f"--decoder-memory {name} requires layers: use --{stack.side}-layers 1 or more")


def _check_init(flags: Any, stack: Stack) -> None:
    """Reject an initialisation that does not support the stack."""
    name, method, side, layer_agg = stack.init.name, stack.init.method, stack.side, stack.aggregator.name
    if not stack.layout.residual:
        if not method.without_residual:
            raise UsageError(
                f"--deep-init {name} requires residual connections, which --layer-agg {layer_agg} replaces ({side}): "
                "use xavier or lipschitz"
            )
    elif not method.layer_norm and layer_agg != "residual":
        raise UsageError(
            f"--deep-init {name} requires stacks without norms: use --{side}-layer-agg residual, not {layer_agg}"
        )
    elif stack.pre_norm and "pre" not in method.norms:
        kind = "post-norm" if method.layer_norm else "stacks without norms"
        raise UsageError(
            f"--deep-init {name} requires {kind} ({side}): use a transformer_postnorm architecture, "
            f"without --{side}-normalize-before"
        )
    if not method.layer_norm and _given(flags, "layernorm_embedding"):
        raise UsageError(f"--layernorm-embedding adds a norm, and --deep-init {name} requires none: omit it")
    if method.three_sublayers and side == "decoder" and (stack.parallel_attention or not stack.cross_attention):
        flag = f"--decoder-attn {stack.attention.name}" if stack.parallel_attention else "--no-cross-attention"
        raise UsageError(f"--deep-init {name} requires three sub-layers, {flag} has two: use ds or lipschitz")
    if method.touches:
        _check_rules(flags, stack)


def _check_rules(flags: Any, stack: Stack) -> None:
    """Reject matrices and depths without a rule in the initialisation."""
    name, side = stack.init.name, stack.side
    if stack.init.method.counts_layers and _given(flags, f"{side}_layers_to_keep"):
        raise UsageError(f"--{side}-layers-to-keep changes the depth that --deep-init {name} counts: omit it")
    for other in ("encoder", "decoder"):
        if getattr(flags, f"{other}_layers", None) == 0:
            raise UsageError(f"--{other}-layers 0 is not supported with --deep-init {name}: use 1 or more")
