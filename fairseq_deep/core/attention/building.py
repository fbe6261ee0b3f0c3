"""Builds attention modules from the description of a stack."""

from typing import Any

from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.stack import Stack

from .multihead import MultiheadAttention


def attention_options(stack: Stack) -> dict[str, Any]:
    """Return the arguments that all attentions of *stack* share."""
    return {
        "dropout": stack.attention_dropout,
        "kv_heads": stack.kv_heads,
        "qk_norm": stack.qk_norm,
        "gate": stack.attention_gate,
        "output_norm": make_norm(stack) if stack.sub_norm else None,
    }


def self_attention(stack: Stack, causal: bool, bias: bool = True) -> MultiheadAttention:
    """Build the self-attention of a layer of *stack*; *causal*: positions see no later ones."""
    return MultiheadAttention(
        stack.dim,
        stack.heads,
        bias=bias,
        relative_positions=stack.relative_positions,
        relative_values=stack.relative_values,
        causal=causal,
        rotary=stack.max_positions if stack.positions == "rotary" else None,
        value_residual=stack.value_residual,
        **attention_options(stack),
    )
