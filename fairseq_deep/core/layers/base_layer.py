"""What the layers of both stacks share: norms, feed-forward sub-layer, dropout, residual connections.

Parameter names are fairseq's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.dropout import Dropout
from fairseq_deep.core.registry import UsageError, nearest
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.residuals.plain import Plain
from fairseq_deep.core.stack import Stack

MODULE_NAMES = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}
NORMS = {
    "self": "self_attn_layer_norm",
    "cross": "encoder_attn_layer_norm",
    "merged": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float()).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _linear(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = {
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "gelu": _gelu,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "swish": F.silu,
    "tanh": torch.tanh,
    "linear": _linear,
}
"""The activation functions of feed-forward sub-layers by fairseq's names (``--activation-fn``)."""


def activation(name: str):
    """The activation function called *name*.

    Raises:
        UsageError: there is none
    """
    if name not in ACTIVATIONS:
        choices = ", ".join(ACTIVATIONS)
        raise UsageError(f"unknown --activation-fn {name}{nearest(name, ACTIVATIONS)}; choose from {choices}")
    return ACTIVATIONS[name]


def has_norms(stack: Stack) -> bool:
    """Whether the layers of *stack* have norms: some initialisations do without."""
    return stack.init is None or stack.init.method.layer_norm


def build_norm(stack: Stack, wanted: bool = True) -> nn.Module:
    """A layer norm, or nothing where none is *wanted*."""
    return nn.LayerNorm(stack.dim) if wanted else nn.Identity()


def build_dropout(stack: Stack, probability: float) -> Dropout:
    """Dropout with the name that fairseq gives the layers of *stack*."""
    return Dropout(probability, MODULE_NAMES[stack.side])


class FeedForward(nn.Module):
    """Base of what has a feed-forward network, FFN(x) = W_2 act(W_1 x + b_1) + b_2.

    Args:
        stack: the stack of the layer
    """

    def __init__(self, stack: Stack):
        super().__init__()
        self.embed_dim = stack.dim
        self.dropout_module = build_dropout(stack, stack.dropout)
        self.relu = stack.activation == "relu"  # which can be done in place where nothing is to be kept
        self.activation_fn = activation(stack.activation)
        self.activation_dropout_module = build_dropout(stack, stack.activation_dropout)
        self.fc1 = nn.Linear(stack.dim, stack.ffn_dim)
        self.fc2 = nn.Linear(stack.ffn_dim, stack.dim)

    def ffn(self, x: Tensor) -> Tensor:
        """The network, with dropout (T x B x C)."""
        hidden = self.fc1(x)
        if self.relu and not torch.is_grad_enabled():
            hidden = torch.relu_(hidden)
        else:
            hidden = self.activation_fn(hidden)
        x = self.activation_dropout_module(hidden)
        return self.dropout_module(self.fc2(x))


class BaseLayer(FeedForward):
    """The parts that a whole Transformer layer has in both stacks; with F a sub-layer (Wang et al., 2019, Eq. 3 and 4):

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

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What a sub-layer F reads of its input *x* (T x B x C): in pre-norm LN(x), which the connection may scale."""
        return self.residual.scale_input(norm(x)) if self.normalize_before else x

    def feed_forward(self, x: Tensor, bottom: Tensor) -> Tensor:
        """The feed-forward sub-layer with its connection and norm (T x B x C); *bottom*: the layer's input."""
        output = self.ffn(self.branch_input(x, self.final_layer_norm))
        x = self.residual(x, output, self.last, bottom)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x
