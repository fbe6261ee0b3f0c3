"""Options of layers with any method: kinds of norm and feed-forward sub-layer, positions, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .stack import RULES


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
