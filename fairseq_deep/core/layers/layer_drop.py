"""LayerDrop: in training, each layer is skipped with probability p.

Reducing Transformer Depth on Demand with Structured Dropout, Fan et al., ICLR 2020, as in fairseq: no output is
rescaled, and evaluation runs all layers. The aggregator replaces the output of a skipped layer
(:meth:`Aggregator.skip`).
"""


import torch
from torch import nn


class LayerDrop(nn.Module):
    """Chooses the layers of a stack that run in a forward pass.

    Args:
        p: probability of skipping a layer
        layers: number of layers
    """

    def __init__(self, p: float, layers: int):
        super().__init__()
        self.p, self.layers = float(p), layers

    def forward(self) -> list[bool]:
        """Return True for each layer that runs; draws the same random numbers as fairseq's ``LayerDropModuleList``."""
        if self.p > 0.0 and self.training:
            draws: list[float] = torch.empty(self.layers).uniform_().tolist()
            return [draw > self.p for draw in draws]
        return [True for _ in range(self.layers)]
