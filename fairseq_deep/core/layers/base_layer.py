"""Common parts of encoder and decoder layers: norms, feed-forward sub-layer, dropout, residual connections.

Parameter names are fairseq's.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_deep.core.norms import make_norm, normalise
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.residuals.plain import Plain
from fairseq_deep.core.stack import Stack

from .feed_forward import FeedForward

NORMS = {
    "self": "self_attn_layer_norm",
    "cross": "encoder_attn_layer_norm",
    "merged": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}


def has_norms(stack: Stack) -> bool:
    """Return whether the layers of *stack* have norms: some initialisations remove them."""
    return stack.init is None or stack.init.method.layer_norm


def build_norm(stack: Stack, wanted: bool = True) -> nn.Module:
    """Build the norm of a sub-layer; an identity if it is not *wanted*."""
    return make_norm(stack) if wanted else nn.Identity()


class BaseLayer(FeedForward):
    """Common parts of the Transformer layers in both stacks; with F a sub-layer (Wang et al., 2019, Eq. 3 and 4):

        post-norm  x_{l+1} = LN(x_l + F(x_l))
        pre-norm   x_{l+1} = x_l + F(LN(x_l))

    Args:
        stack: the stack of the layer
        residual: the residual connections of its sub-layers; None: plain ones
    """

    def __init__(self, stack: Stack, residual: ResidualConnection | None = None):
        super().__init__(stack)
        self.sublayers = [(name, NORMS[name]) for name in stack.sublayers]
        self.last = len(self.sublayers) - 1
        self.final_layer_norm = build_norm(stack, has_norms(stack))
        self.residual = Plain(stack, 1) if residual is None else residual
        self.normalize_before = self.residual.pre_norm

    def branch_input(self, x: Tensor, norm: nn.Module, languages: Tensor | None = None) -> Tensor:
        """Return the input of F for a sub-layer's input *x* (T x B x C): in pre-norm LN(x), perhaps scaled."""
        return self.residual.scale_input(normalise(norm, x, languages)) if self.normalize_before else x

    def branch_sum(self, x: Tensor, norm: nn.Module, languages: Tensor | None) -> Tensor:
        """Return the sub-layer's output for the sum *x* of a residual connection (T x B x C): in post-norm LN(x)."""
        return x if self.normalize_before else normalise(norm, x, languages)

    def feed_forward(self, x: Tensor, bottom: Tensor, languages: Tensor | None = None) -> Tensor:
        """Run the feed-forward sub-layer with its connection and norm (T x B x C); *bottom*: the layer's input."""
        output = self.ffn(self.branch_input(x, self.final_layer_norm, languages))
        x = self.residual(x, output, self.last, bottom)
        return self.branch_sum(x, self.final_layer_norm, languages)
