"""Linear aggregation: a linear combination of all layers, on top of a plain stack.

Exploiting Deep Representations for Neural Machine Translation, Dou et al., EMNLP 2018. With y_l the output of layer l:

    H = sum_{l=1..L} W_l y_l

H is the output of the stack; the layers are connected as in the plain stack.

Names here: ``matrix`` is [W_1, ..., W_L]; H is then one product with [y_1; ...; y_L]. We infer from secondary sources
that each W_l is a full matrix.

We choose the initial values W_L = I and all others 0; training then starts from the plain stack. With L random
matrices, the initial output would be a random mixture of layers with L times the variance, which a post-norm stack does
not normalise. Zeros do not block learning: the gradient of W_l does not depend on W_l.
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.stack import Stack

from .base import AGGREGATORS, LayerOutputs


@AGGREGATORS.register("linear")
class Linear(LayerOutputs):
    """Linear aggregation.

    Args:
        stack: see :class:`Aggregator`

    Shapes:
        matrix: C x LC
    """

    paper = "Dou 2018"
    architectures = {"linear_6l": ("post", (6, 6), {})}

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.matrix = nn.Parameter(torch.empty(self.dim, self.num_layers * self.dim))
        nn.init.zeros_(self.matrix)
        if self.num_layers > 0:
            nn.init.eye_(self.matrix[:, -self.dim :])

    # no matrices(): filling them would undo the start as a plain stack

    def finish(self, state: list[Tensor]) -> Tensor:
        if self.num_layers == 0:
            return state[0]
        return F.linear(torch.cat(state, dim=-1), self.matrix).to(state[-1].dtype)
