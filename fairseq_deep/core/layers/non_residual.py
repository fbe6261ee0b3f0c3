"""Sub-layers without residual connections, for aggregators that replace these connections.

A sub-layer is F(LN(x)) or F(x), with dropout. If an aggregator also replaces the feed-forward sub-layers, a layer
consists of its attentions: Rewiring the Transformer with Depth-Wise LSTMs, Xu et al., 2024. Let Out_{i-1} be the input
of the layer, M the encoder's output, and LN a layer norm. The paper does not give the position of LN; we normalise the
query, as in the authors' other models:

    encoder   A = SelfAttention(LN(Out_{i-1}))
    decoder   S = SelfAttention(LN(Out_{i-1})),  X = CrossAttention(LN(S + Out_{i-1}), M),  A = S + X or [S | X]

Section 2.3 of the paper computes both attentions of the decoder as in the original layer: the query of the second
includes the layer's input. Without ``attn_residual`` the query is LN(S).

The projections have no bias, as the printed parameter counts imply.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention import FirstValues, self_attention
from fairseq_deep.core.norms import normalise
from fairseq_deep.core.stack import Stack

from .base_layer import build_norm
from .context import DecoderContext
from .feed_forward import FeedForward, build_dropout
from .parallel_attention import ParallelAttention
from .target_attention import attend_to_source, attend_to_target, source_attention, target_attention


class AttentionEncoderLayer(nn.Module):
    """Self-attention of the input, with dropout; no residual connection.

    Args:
        stack: the encoder
    """

    def __init__(self, stack: Stack):
        super().__init__()
        self.self_attn = self_attention(stack, causal=False, bias=stack.layout.attention_bias)
        self.self_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        languages: Tensor | None = None,
        values: FirstValues | None = None,
    ) -> Tensor:
        """Return the attention output (T x B x C); see :meth:`EncoderLayer.forward`."""
        query = normalise(self.self_attn_layer_norm, x, languages)
        x, _ = self.self_attn(query, key_padding_mask=encoder_padding_mask, values=values)
        return self.dropout_module(x)


class AttentionDecoderLayer(nn.Module):
    """Masked self-attention and attention to the source, or one of them, each with dropout.

    Args:
        stack: the decoder; its layout defines the merge of the outputs of two attentions
        attends_to_self, attends_to_source: whether the layer has each of the two attentions
    """

    def __init__(self, stack: Stack, attends_to_self: bool = True, attends_to_source: bool = True):
        super().__init__()
        self.concat = stack.layout.merge == "concat"
        self.attn_residual = stack.layout.attn_residual
        self.self_attn = self.self_attn_layer_norm = None
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if attends_to_self:
            self.self_attn = target_attention(stack)
            self.self_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        if attends_to_source:
            self.encoder_attn = source_attention(stack)
            self.encoder_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(self, x: Tensor, context: DecoderContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer; see :meth:`DecoderLayer.forward`.

        Returns:
            the merged attention output (T x B x C, or T x B x 2C for "concat"), and the weights of the attention to the
            source (H x B x T x S) or None
        """
        outputs, weights, query = [], None, x
        if self.self_attn is not None:
            y = normalise(self.self_attn_layer_norm, x, context.languages)
            y = attend_to_target(self.self_attn, y, context)
            y = self.dropout_module(y).to(x.dtype)  # under autocast, types can differ
            outputs.append(y)
            query = x + y if self.attn_residual else y
        if self.encoder_attn is not None and context.memory is not None:
            query = normalise(self.encoder_attn_layer_norm, query, context.languages)
            y, weights = attend_to_source(self.encoder_attn, query, context, need_weights)
            outputs.append(self.dropout_module(y))
        if len(outputs) == 1:
            return outputs[0], weights
        return torch.cat(outputs, dim=-1) if self.concat else outputs[0] + outputs[1], weights


class ParallelAttentionDecoderLayer(ParallelAttention):
    """Merged attentions of the normalised input, with dropout: A = MATT(LN(Out_{i-1})).

    Args:
        stack: the decoder
    """

    def __init__(self, stack: Stack):
        super().__init__()
        self.set_attentions(source_attention(stack), target_attention(stack))
        self.encoder_attn_layer_norm = build_norm(stack, stack.layout.input_norm)
        self.dropout_module = build_dropout(stack, stack.dropout)

    def forward(self, x: Tensor, context: DecoderContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer; see :meth:`AttentionDecoderLayer.forward`."""
        x = normalise(self.encoder_attn_layer_norm, x, context.languages)
        x, weights = self.attend(x, context, need_weights)
        return self.dropout_module(x), weights


class EncoderFeedForward(FeedForward):
    """The feed-forward network of an encoder layer; no residual connection.

    Args:
        stack: the stack of the layer
    """

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.final_layer_norm = build_norm(stack, stack.layout.input_norm)

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        languages: Tensor | None = None,
        values: FirstValues | None = None,
    ) -> Tensor:
        """Return the FFN of *x* (T x B x C); ignores the padding and the values."""
        return self.ffn(normalise(self.final_layer_norm, x, languages))


class DecoderFeedForward(EncoderFeedForward):
    """The feed-forward network of a decoder layer; no residual connection."""

    def forward(self, x: Tensor, context: DecoderContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the FFN of *x* (T x B x C), and None; see :meth:`DecoderLayer.forward`."""
        return super().forward(x, None, context.languages), None
