"""Linear aggregation: above a plain stack, a linear combination of all its layers.

Exploiting Deep Representations for Neural Machine Translation, Dou et al., EMNLP 2018. With y_l the output of layer l:

    H = sum_{l=1..L} W_l y_l

H is the output of the stack; the layers are connected as in the plain stack.

Names here: ``matrix`` is [W_1, ..., W_L], so that H is one product with [y_1; ...; y_L]. That each W_l is a full matrix
is our reading of secondary sources.

Our choice for the start: W_L = I and all others 0, so that training begins with the plain stack. With L random matrices
the output would begin as a random mixture of layers, L times as large in variance, which a post-norm stack does not
normalise. Zeros are no dead end: the gradient of W_l does not depend on W_l.
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.stack import Stack

from .base import AGGREGATORS, Aggregator


@AGGREGATORS.register("linear")
class Linear(Aggregator):
    """Linear aggregation. The state is the list of the outputs y_1 ... y_l; before there are any, the embedding output.

    Args:
        stack: see :class:`Aggregator`

    Shapes:
        matrix: C x LC
    """

    paper = "Dou 2018"

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.matrix = nn.Parameter(torch.empty(self.dim, self.num_layers * self.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let H be y_L."""
        nn.init.zeros_(self.matrix)
        if self.num_layers > 0:
            nn.init.eye_(self.matrix[:, -self.dim :])

    # no matrices(): an initialisation that fills them would undo the plain start

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        return [output] if layer == 0 else state + [output]

    def finish(self, state: list[Tensor]) -> Tensor:
        if self.num_layers == 0:
            return state[0]
        return F.linear(torch.cat(state, dim=-1), self.matrix).to(state[-1].dtype)
