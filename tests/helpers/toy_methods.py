"""Methods that the package does not know, each as small as its contract allows."""

import torch
from torch import nn

from fairseq_deep.core.aggregators import AGGREGATORS, Aggregator
from fairseq_deep.core.fields import Option
from fairseq_deep.core.memories import MEMORIES, Memory
from fairseq_deep.core.residuals import RESIDUALS, ResidualConnection
from fairseq_deep.core.stack import Stack


class ToyAggregator(Aggregator):
    """x_{l+1} = a y_l + (1 - a) y_{l-1}."""

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.share = nn.Parameter(torch.tensor(0.7))

    def start(self, x):
        return [x, x]

    def read(self, state: list[torch.Tensor], layer: int):
        return (self.share * state[1] + (1 - self.share) * state[0]).to(state[1].dtype)

    def write(self, state: list[torch.Tensor], layer: int, output):
        return [state[1], output]

    def finish(self, state: list[torch.Tensor]):
        return self.read(state, self.num_layers)


class ToyMemory(Memory):
    """z_j = y_L + b_j y_0."""

    options = {"start": Option("initial b")}

    def __init__(self, encoder: Stack, decoder: Stack, start: float = 0.5):
        super().__init__(encoder, decoder)
        self.weight = nn.Parameter(torch.full((self.num_memories,), start))

    def forward(self, outputs: list[torch.Tensor], state: list[torch.Tensor]):
        return [(outputs[-1] + share * outputs[0]).to(outputs[0].dtype) for share in self.weight.unbind()]


class ToyResidual(ResidualConnection):
    """r = x + s_i F, and from the layer's input once more: r += t x_1 (the norm after it takes the scale)."""

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.weight = nn.Parameter(torch.full((self.sublayers,), 1.0 / number))
        self.bottom = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, output, sublayer: int, bottom):
        return (x + self.weight[sublayer] * output + self.bottom * bottom).to(x.dtype)


TOYS = [(AGGREGATORS, ToyAggregator), (MEMORIES, ToyMemory), (RESIDUALS, ToyResidual)]
