"""Builds attention modules from the description of a stack."""

from dataclasses import replace

from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.stack import Stack

from .multihead import MultiheadAttention
from .options import AttentionOptions


def attention_options(stack: Stack, bias: bool = True) -> AttentionOptions:
    """Return the options that all attentions of *stack* share."""
    return AttentionOptions(
        dropout=stack.attention_dropout,
        bias=bias,
        kv_heads=stack.kv_heads,
        qk_norm=stack.qk_norm,
        gate=stack.attention_gate,
        output_norm=make_norm(stack) if stack.sub_norm else None,
    )


def self_attention(stack: Stack, causal: bool, bias: bool = True) -> MultiheadAttention:
    """Build the self-attention of a layer of *stack*; *causal*: positions see no later ones."""
    options = replace(
        attention_options(stack, bias),
        relative_positions=stack.relative_positions,
        relative_values=stack.relative_values,
        causal=causal,
        rotary=stack.max_positions if stack.positions == "rotary" else None,
        value_residual=stack.value_residual,
    )
    return MultiheadAttention(stack.dim, stack.heads, options=options)
