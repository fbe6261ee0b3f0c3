"""The layers of both stacks, with or without residual connections, with fairseq's parameter names.

Attention Is All You Need, Vaswani et al., 2017; norms as in Wang et al., 2019, Eq. 3 and 4. A layer is a sequence of
sub-layers F: attention to its own positions ("self"), attention to the source ("cross"), both in one ("merged"), and
a feed-forward network ("ffn"). Each F ends with dropout.

Merged attention (Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention, Zhang et al., EMNLP
2019, Section 6) is

    SAAN(S) = [M_a (S W_v)] W_o             Eq. (16)     M_a: mean over each position and all earlier ones
    MATT(S) = SAAN(S) + ATT(S, H_L)         Eq. (17)     W_v and W_o belong to the attention to the source

or, in the ablations of its Table 3, ATT'(S) + ATT(S, H_L) with ATT' a self-attention (row 6) or the average attention
network (row 7), each with its own matrices. Names here: S is ``x``, H_L ``context.memory``, ATT ``encoder_attn``, W_v
and W_o its ``v_proj`` and ``out_proj`` with biases.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_deep.core.attention import LayerContext, RunningMean
from fairseq_deep.core.native.layers import describe_layer
from fairseq_deep.core.norms import make_norm, normalise
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

from .feed_forward import FeedForward

NORMS = {
    "self": "self_attn_layer_norm",
    "cross": "encoder_attn_layer_norm",
    "merged": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}


def has_norms(stack: Stack) -> bool:
    """Return whether the layers of *stack* have norms: some initialisations and aggregators remove them."""
    return stack.init.method.layer_norm if stack.layout.residual else stack.layout.input_norm


def attend_to_target(attention: nn.Module, x: Tensor, context: LayerContext) -> Tensor:
    """Attend to the positions of the stack itself (T x B x C)."""
    native = context.native and context.native.parts.get(attention)
    return native(x, context) if native else attention(x, context)[0]


def attend_to_source(
    attention: nn.Module, x: Tensor, context: LayerContext, need_weights: bool, added: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attend to the source: T x B x C, and the weights (H x B x T x S) or None.

    Args:
        added: T x B x C, added to the output of the heads before the output projection
    """
    native = context.native and context.native.parts.get(attention)
    if native and not need_weights:
        return native(x, context, added), None
    return attention(x, context, need_weights, added)


class SubLayers(FeedForward):
    """Base class of modules with sub-layers F and their norms.

    Args:
        stack: the stack of the layer
        names: its sub-layers

    Attributes:
        sublayers: the name of each sub-layer, and of its norm
    """

    def __init__(self, stack: Stack, names: tuple[str, ...]):
        super().__init__(stack, "ffn" in names)
        self.sublayers = [(name, NORMS[name]) for name in names]
        if "ffn" in names:
            self.final_layer_norm = self._build_norm(stack)

    def build_attentions(self, stack: Stack) -> None:
        """Build the attentions, with their norms; they follow other modules in fairseq's order of parameters."""
        method, bias = stack.attention.build(), stack.layout.attention_bias
        for name, norm in self.sublayers:
            if name in ("cross", "merged"):
                self.encoder_attn = method.source(stack, bias)
            if name in ("self", "merged"):
                self.self_attn = method.target(stack, bias)
            if name == "merged":
                self.mean = RunningMean() if self.self_attn is None else None
            if name != "ffn":
                setattr(self, norm, self._build_norm(stack))

    @staticmethod
    def _build_norm(stack: Stack) -> nn.Module:
        return make_norm(stack) if has_norms(stack) else nn.Identity()

    def branch(
        self, name: str, x: Tensor, context: LayerContext, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return F (T x B x C) for its input *x*, and the weights of the attention to the source or None."""
        if name == "ffn":
            return self.ffn(x), None
        if name == "self":
            return self.dropout_module(attend_to_target(self.self_attn, x, context)), None
        added = None
        if name == "merged" and self.mean is not None:
            assert context.memory is not None, "merged attention requires a source"
            added = self.mean(self.encoder_attn.v_proj(x), context)
        y, weights = attend_to_source(self.encoder_attn, x, context, need_weights, added)
        if name == "merged" and self.self_attn is not None:
            y = y + attend_to_target(self.self_attn, x, context).to(y.dtype)
        return self.dropout_module(y), weights


class Layer(SubLayers):
    """Layer with residual connections r:

        post-norm  x' = LN(r(x, F(x)))
        pre-norm   x' = r(x, F(LN(x)))

    Args:
        stack: the stack of the layer
        residual: the connections of its sub-layers
    """

    kernels = describe_layer

    def __init__(self, stack: Stack, residual: ResidualConnection):
        super().__init__(stack, stack.sublayers)
        self.residual = residual
        self.normalize_before = residual.pre_norm
        self.build_attentions(stack)

    def forward(self, x: Tensor, context: LayerContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            x: T x B x C
            context: inputs shared by all layers
            need_weights: return the weights of the attention to the source

        Returns:
            T x B x C, and the weights (H x B x T x S) or None
        """
        bottom, weights = x, None
        for index, (name, norm) in enumerate(self.sublayers):
            if name != "cross" or context.memory is not None:
                x, found = self.connect(index, x, getattr(self, norm), bottom, context, need_weights)
                weights = weights if found is None else found
        return x, weights

    def connect(
        self, index: int, x: Tensor, norm: nn.Module, bottom: Tensor, context: LayerContext, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the sub-layer *index* with its connection and *norm*; *bottom*: the layer's input (T x B x C)."""
        y, weights = self.branch(
            self.sublayers[index][0], self.branch_input(x, norm, context.languages), context, need_weights
        )
        x = self.residual(x, y, index, bottom)
        return x if self.normalize_before else normalise(norm, x, context.languages), weights

    def branch_input(self, x: Tensor, norm: nn.Module, languages: Tensor | None = None) -> Tensor:
        """Return the input of F for a sub-layer's input *x* (T x B x C): in pre-norm LN(x), perhaps scaled."""
        return self.residual.scale_input(normalise(norm, x, languages)) if self.normalize_before else x


class BareLayer(SubLayers):
    """Sub-layers F(LN(x)) or F(x) without residual connections, for aggregators that replace these connections.

    If an aggregator also replaces the feed-forward sub-layers, a layer consists of its attentions: Rewiring the
    Transformer with Depth-Wise LSTMs, Xu et al., 2024. Let Out_{i-1} be the input of the layer, M the encoder's output,
    and LN a layer norm. The paper does not give the position of LN; we normalise the query, as in the authors' other
    models:

        encoder   A = SelfAttention(LN(Out_{i-1}))
        decoder   S = SelfAttention(LN(Out_{i-1})),  X = CrossAttention(LN(S + Out_{i-1}), M),  A = S + X or [S | X]
        merged    A = MATT(LN(Out_{i-1}))

    Section 2.3 of the paper computes both attentions of the decoder as in the original layer: the query of the second
    includes the layer's input. Without ``attn_residual`` the query is LN(S). The projections have no bias, as the
    printed parameter counts imply.

    Args:
        stack: the stack of the layer; its layout defines the merge of the outputs of two attentions
        names: one sub-layer, or all attentions
    """

    def __init__(self, stack: Stack, names: tuple[str, ...]):
        super().__init__(stack, names)
        self.concat, self.attn_residual = stack.layout.merge == "concat", stack.layout.attn_residual
        self.build_attentions(stack)

    def forward(self, x: Tensor, context: LayerContext, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run the layer; see :meth:`Layer.forward`.

        Returns:
            F, the merged output of two attentions (T x B x C, or T x B x 2C for "concat"), and the weights of the
            attention to the source (H x B x T x S) or None
        """
        outputs: list[Tensor] = []
        weights, query = None, x
        for name, norm in self.sublayers:
            if name == "cross" and context.memory is None:
                continue
            if outputs:
                outputs[0] = outputs[0].to(x.dtype)  # under autocast, types can differ
                query = x + outputs[0] if self.attn_residual else outputs[0]
            query = normalise(getattr(self, norm), query, context.languages)
            output, weights = self.branch(name, query, context, need_weights)
            outputs.append(output)
        if len(outputs) == 1:
            return outputs[0], weights
        return torch.cat(outputs, dim=-1) if self.concat else outputs[0] + outputs[1], weights
