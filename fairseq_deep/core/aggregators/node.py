"""Aggregation node, which merges the outputs of several layers into one.

Exploiting Deep Representations for Neural Machine Translation, Dou et al., EMNLP 2018:

    AGG(u_1, ..., u_n) = LN( FFN([u_1; ...; u_n]) + u_1 + ... + u_n )

with [;] the concatenation of the features of one position and FFN(z) = W_2 relu(W_1 z + b_1) + b_2.

Names here: ``fc1`` is W_1 (D x nC) with b_1, ``fc2`` is W_2 (C x D) with b_2, ``layer_norm`` is LN.

The paper's parameter counts imply that D is the width of the stack's feed-forward sub-layers. Our choices: ReLU;
dropout at the same points as in those sub-layers; Xavier matrices, biases 0, norms 1 and 0.
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.stack import Stack
from fairseq_deep.core.xavier import fill_xavier

from .base import Aggregator


class Node(nn.Module):
    """AGG of a fixed number of inputs.

    Args:
        stack: the stack; if it has no feed-forward width, D = 4C
        inputs: number n of inputs

    Shapes:
        fc1.weight: D x nC
        fc2.weight: C x D
    """

    def __init__(self, stack: Stack, inputs: int):
        super().__init__()
        hidden = stack.ffn_dim or 4 * stack.dim
        self.inputs = inputs
        self.fc1 = nn.Linear(inputs * stack.dim, hidden)
        self.fc2 = nn.Linear(hidden, stack.dim)
        self.layer_norm = nn.LayerNorm(stack.dim)
        self.activation_dropout = dropout_of(self, stack.activation_dropout)
        self.dropout = dropout_of(self, stack.dropout)
        fill_xavier(self.fc1, self.fc2)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Return the merged representation (T x B x C) of *inputs* (n times T x B x C)."""
        joined = torch.cat(inputs, dim=-1)
        x = self.dropout(self.fc2(self.activation_dropout(F.relu(self.fc1(joined)))))
        # one reduction, which accumulates in fp32 for any dtype, instead of n roundings
        total = x + joined.view(x.size(0), x.size(1), self.inputs, x.size(2)).sum(dim=2)
        # under autocast, the norm and the sum can have different dtypes
        return self.layer_norm(total.to(self.layer_norm.weight.dtype)).to(inputs[0].dtype)


class NodeAggregator(Aggregator):
    """Base class of aggregators that consist of nodes.

    A node ends with a norm, but a pre-norm stack keeps its final norm after the last node (our choice). It has no
    effect at initialisation, and memories and ``--no-decoder-final-norm`` mean the same as in other stacks.

    Args:
        stack: see :class:`Aggregator`
        inputs: number of inputs of each node, from the bottom
    """

    paper = "Dou 2018"

    def __init__(self, stack: Stack, inputs: list[int]):
        super().__init__(stack)
        self.nodes = nn.ModuleList(Node(stack, number) for number in inputs)

    def matrices(self) -> list[Tensor]:
        return [linear.weight for node in self.nodes for linear in (node.fc1, node.fc2)]

    def compiled(self) -> list[nn.Module]:
        return list(self.nodes)

    def merge(self, inputs: list[Tensor], index: int) -> Tensor:
        """Merge *inputs* (T x B x C each) with the node of the 0-based *index*."""
        return self.nodes[index](inputs)
