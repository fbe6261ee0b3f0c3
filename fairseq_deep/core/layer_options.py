"""Options of layers with any method: kinds of norm and feed-forward sub-layer, positions, attention, languages."""

from __future__ import annotations

from .fields import Option, add_flag
from .stack import RULES, Stack, flag_of

OPTIONS = {
    "relative_positions": Option("relative positions in self-attention, clipped at N; on the keys"),
    "relative_values": Option("also add relative positions to the values"),
    "norm": Option("norms of layers and stacks, LayerNorm or RMSNorm", RULES["norm"]),
    "ffn": Option("feed-forward sub-layers, gated with 2/3 of the width", RULES["ffn"]),
    "kv_heads": Option("decoder heads of keys and values, shared by groups of query heads (default: no sharing)"),
    "qk_norm": Option("normalise queries and keys of each attention head"),
    "attention_gate": Option("multiply the output of attention by a gate of its input", RULES["attention_gate"]),
    "sub_norm": Option("Sub-LN: also normalise before the last matrix of each sub-layer"),
    "value_residual": Option("self-attentions also read the values of the first layer, with learned weights"),
    "language_transform": Option("LaLT: transform the encoder's output with a matrix of the target language"),
    "language_norm": Option("LaLN: layer norms have gains and biases of the target language"),
}
"""Attributes of :class:`Stack` with flags of their own."""


def add_args(parser) -> None:
    """Add the flags, without defaults."""
    for name, option in OPTIONS.items():
        add_flag(parser, flag_of(name, "decoder"), option, Stack, name, getattr(Stack, name))
    parser.add_argument("--rotary-positions", action="store_true",
                        help="rotary positions in self-attention, instead of absolute positions")
    parser.add_argument("--num-languages", type=int, metavar="N",
                        help="number of target languages (default: the number of tags <2xx> in the source dictionary)")


def choices_of(stack: Stack) -> dict[str, str]:
    """Return the options of *stack* other than the plain ones, by attribute, as on the command line."""
    plain = {name: getattr(Stack, name) for name in OPTIONS if name != "relative_values"}  # of relative positions
    values = {name: getattr(stack, name) for name, default in plain.items() if getattr(stack, name) != default}
    if stack.kv_heads == stack.heads:
        del values["kv_heads"]
    flags = {name: stack.flag(name) for name in values}
    return {name: flags[name] if value is True else f"{flags[name]} {value}" for name, value in values.items()}
