"""Feed-forward sub-layers: plain, or gated (``--ffn``).

Attention Is All You Need, Vaswani et al., 2017, Eq. 2, and GLU Variants Improve Transformer, Shazeer, 2020, Eq. 6:

    FFN(x)    = W_2 act(W_1 x + b_1) + b_2
    SwiGLU(x) = W_2 (swish(W_1 x) * V x),    GEGLU(x) = W_2 (gelu(W_1 x) * V x)

Gated networks have no biases. Three matrices of 2/3 of the width have as many parameters as two of the whole width.

Names here: ``fc1``, ``fc2`` and ``fc_linear`` are W_1, W_2 and V.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.dropout import Dropout
from fairseq_deep.core.norms import make_norm
from fairseq_deep.core.stack import GATED, Stack

MODULE_NAMES = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}
MULTIPLE = 8  # the width of a gated network is a multiple of this


def _gelu(x: Tensor) -> Tensor:
    """Return gelu(x) computed in fp32, as fairseq computes it, also for fp64."""
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


def build_dropout(stack: Stack, probability: float) -> Dropout:
    """Build a dropout with fairseq's module name for the layers of *stack*."""
    return Dropout(probability, MODULE_NAMES[stack.side])


def hidden_width(stack: Stack) -> int:
    """Return the hidden width: ``--encoder-ffn-embed-dim``, or for gated networks 2/3 of it, rounded up."""
    if stack.ffn not in GATED:
        return stack.ffn_dim
    return -(-2 * stack.ffn_dim // (3 * MULTIPLE)) * MULTIPLE


class FeedForward(nn.Module):
    """Base class of modules with a feed-forward network.

    Args:
        stack: the stack of the layer
        present: whether the layer has one; otherwise the module only has the layer's dropout
    """

    def __init__(self, stack: Stack, present: bool):
        super().__init__()
        self.dropout_module = build_dropout(stack, stack.dropout)
        if not present:
            return
        gated, width = stack.ffn in GATED, hidden_width(stack)
        name = GATED.get(stack.ffn, stack.activation)
        self.relu = name == "relu"  # can be computed in place without gradients
        self.activation_fn = ACTIVATIONS[name]
        self.activation_dropout_module = build_dropout(stack, stack.activation_dropout)
        self.fc1 = nn.Linear(stack.dim, width, bias=not gated)
        self.fc2 = nn.Linear(width, stack.dim, bias=not gated)
        self.fc_linear = nn.Linear(stack.dim, width, bias=False) if gated else None
        self.ffn_norm = make_norm(stack, width) if stack.sub_norm else None

    def ffn(self, x: Tensor) -> Tensor:
        """Run the network, with dropout (T x B x C)."""
        hidden = self.fc1(x)
        if self.relu and not torch.is_grad_enabled():
            hidden = torch.relu_(hidden)
        else:
            hidden = self.activation_fn(hidden)
        if self.fc_linear is not None:
            hidden = hidden * self.fc_linear(x)
        hidden = self.activation_dropout_module(hidden)
        return self.dropout_module(self.fc2(hidden if self.ffn_norm is None else self.ffn_norm(hidden)))
