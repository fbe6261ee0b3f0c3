"""Transformer decoder layers (Attention Is All You Need, Vaswani et al., 2017), with two or merged attentions."""

from __future__ import annotations

from torch import Tensor

from fairseq_deep.core.native.layers import describe_layer
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .base_layer import BaseLayer, build_norm, has_norms
from .context import DecoderContext
from .parallel_attention import ParallelAttention
from .target_attention import attend_to_source, attend_to_target, source_attention, target_attention


class DecoderLayer(BaseLayer):
    """Self-attention, attention to the source and feed-forward, each with dropout, residual connection and layer norm.

    ``--decoder-attn average`` or ``ssru`` replaces self-attention by average attention or a recurrence.

    Args:
        stack: the decoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    kernels = describe_layer

    def __init__(self, stack: Stack, residual: ResidualConnection | None = None):
        super().__init__(stack, residual)
        self.self_attn = target_attention(stack)
        self.self_attn_layer_norm = build_norm(stack, has_norms(stack))
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if stack.cross_attention:
            self.encoder_attn = source_attention(stack)
            self.encoder_attn_layer_norm = build_norm(stack, has_norms(stack))

    def forward(self, x: Tensor, context: DecoderContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            x: T x B x C
            context: inputs shared by all layers
            need_weights: return the weights of the attention to the source

        Returns:
            T x B x C, and the weights (H x B x T x S) or None
        """
        bottom, languages = x, context.languages
        x = attend_to_target(self.self_attn, self.branch_input(x, self.self_attn_layer_norm, languages), context)
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        x = self.branch_sum(x, self.self_attn_layer_norm, languages)

        weights = None
        if self.encoder_attn is not None and context.memory is not None:
            residual = x
            x = self.branch_input(x, self.encoder_attn_layer_norm, languages)
            x, weights = attend_to_source(self.encoder_attn, x, context, need_weights)
            x = self.residual(residual, self.dropout_module(x), 1, bottom)
            x = self.branch_sum(x, self.encoder_attn_layer_norm, languages)
        return self.feed_forward(x, bottom, languages), weights


class ParallelDecoderLayer(ParallelAttention, BaseLayer):
    """Both attentions in one sub-layer, then feed-forward, each with dropout, residual connection and layer norm.

    Args:
        stack: the decoder
        residual: the residual connections of its sub-layers; None: plain ones
    """

    def __init__(self, stack: Stack, residual: ResidualConnection | None = None):
        super().__init__(stack, residual)
        self.set_attentions(source_attention(stack), target_attention(stack))
        self.encoder_attn_layer_norm = build_norm(stack, has_norms(stack))

    def forward(self, x: Tensor, context: DecoderContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer; see :meth:`DecoderLayer.forward`."""
        bottom, languages = x, context.languages
        x, weights = self.attend(self.branch_input(x, self.encoder_attn_layer_norm, languages), context, need_weights)
        x = self.residual(bottom, self.dropout_module(x), 0, bottom)
        x = self.branch_sum(x, self.encoder_attn_layer_norm, languages)
        return self.feed_forward(x, bottom, languages), weights
