"""Options of layers with any method: kinds of norm and feed-forward sub-layer, positions, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .registry import UsageError
from .stack import RULES, Stack


def add_args(parser) -> None:
    """Add the flags, without defaults."""
    parser.add_argument("--relative-positions", type=int, metavar="K",
                        help="relative positions in self-attention, clipped at K; on the keys")
    parser.add_argument("--relative-values", action="store_true", help="also add relative positions to the values")
    parser.add_argument("--rotary-positions", action="store_true",
                        help="rotary positions in self-attention, instead of absolute positions")
    parser.add_argument("--norm", choices=RULES["norm"],
                        help="norms of layers and stacks: LayerNorm, RMSNorm (default: layer)")
    parser.add_argument("--ffn", choices=RULES["ffn"],
                        help="feed-forward sub-layers: plain, or gated with 2/3 of the width (default: plain)")
    parser.add_argument("--decoder-kv-heads", type=int, metavar="N",
                        help="decoder heads of keys and values, shared by groups of query heads (default: no sharing)")
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys of each attention head")
    parser.add_argument("--attention-gate", choices=RULES["attention_gate"],
                        help="multiply the output of attention by a sigmoid gate of its input, per head or feature")
    parser.add_argument("--sub-norm", action="store_true",
                        help="Sub-LN: also normalise before the last matrix of each sub-layer")
    parser.add_argument("--value-residual", action="store_true",
                        help="self-attentions also read the values of the first layer, with learned weights")


def describe(get: Callable[..., Any], side: str) -> dict[str, Any]:
    """Return attributes of :class:`Stack` for *side*; *get* returns a flag, or a default if it is unset."""
    absolute = "learned" if get(f"{side}_learned_pos") else "sinusoidal"
    absolute = "none" if get("no_token_positional_embeddings") else absolute
    return {
        "positions": "rotary" if get("rotary_positions") else absolute,
        "relative_positions": get("relative_positions"),
        "relative_values": bool(get("relative_values", False)),
        "norm": get("norm", "layer"),
        "ffn": get("ffn", "plain"),
        "kv_heads": get(f"{side}_kv_heads"),
        "qk_norm": bool(get("qk_norm", False)),
        "attention_gate": get("attention_gate"),
        "sub_norm": bool(get("sub_norm", False)),
        "value_residual": bool(get("value_residual", False)),
    }


def check_layer_options(flags: Any, stack: Stack) -> None:
    """Reject options that contradict each other or the methods of *stack*.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    _check_relative(stack)
    _check_rotary(flags, stack)
    _check_kv_heads(stack)
    _check_ffn(stack)
    _check_value_residual(flags, stack)
    if not stack.init.method.layer_norm:
        for flag, chosen in (("--norm rms", stack.norm == "rms"), ("--qk-norm", stack.qk_norm),
                             ("--sub-norm", stack.sub_norm), ("--language-norm", stack.language_norm)):  # fmt: skip
            if chosen:
                raise UsageError(
                    f"{flag} is not supported with --deep-init {stack.init.name}, which requires no norms: omit it"
                )


def _check_relative(stack: Stack) -> None:
    if stack.relative_positions is None:
        return
    if not stack.attention.method.relative:
        raise UsageError(
            f"--relative-positions is not supported with --{stack.side}-attn {stack.attention.name}: "
            "omit one of them"
        )


def _check_rotary(flags: Any, stack: Stack) -> None:
    if stack.positions != "rotary":
        return
    if getattr(flags, f"{stack.side}_learned_pos", None):
        raise UsageError(f"--rotary-positions replaces absolute positions: omit --{stack.side}-learned-pos")
    if not stack.attention.method.relative:
        raise UsageError(
            f"--rotary-positions is not supported with --{stack.side}-attn {stack.attention.name}: omit one of them"
        )


def _check_kv_heads(stack: Stack) -> None:
    if stack.kv_heads not in (None, stack.heads) and stack.attention.name == "merged":
        raise UsageError(
            "--decoder-kv-heads is not supported with --decoder-attn merged, which adds values to all heads: omit it"
        )


def _check_ffn(stack: Stack) -> None:
    if stack.ffn == "plain":
        return
    if not stack.layout.feed_forward:
        raise UsageError(
            f"--ffn {stack.ffn} has no effect with --layer-agg {stack.aggregator.name}, which replaces feed-forward "
            f"sub-layers ({stack.side}): omit it"
        )


def _check_value_residual(flags: Any, stack: Stack) -> None:
    if not stack.value_residual:
        return
    side, method = stack.side, stack.aggregator.name
    if max(stack.encoder_layers, stack.decoder_layers) < 2:
        raise UsageError("--value-residual has no effect on stacks of one layer: omit it, or use --encoder-layers 2")
    for flag in (f"{side}_layerdrop", f"{side}_layers_to_keep"):
        if getattr(flags, flag, None):
            raise UsageError(
                f"--value-residual requires the values of the first layer ({side}): omit --{flag.replace('_', '-')}"
            )
    if stack.layout.num_evaluations > 1:
        raise UsageError(
            f"--value-residual is not supported with --layer-agg {method}, which evaluates layers more than once "
            f"({side}): omit it, or use --{side}-layer-agg residual"
        )
    if side == "decoder" and not stack.attention.method.relative:
        raise UsageError(
            f"--value-residual is not supported with --decoder-attn {stack.attention.name}, which has no "
            "self-attention: omit one of them"
        )
