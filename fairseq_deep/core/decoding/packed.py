"""Linear layers in fp32 for decoding on a CPU, by compiled kernels: y = x W^T + b.

The kernels read a copy of W in panels (``native/products.h``). Where there are none, layers stay as they are.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.native.packed import PacksWeight, runs_native


class PackedLinear(PacksWeight, nn.Linear):
    """A linear layer that the kernels compute where they may.

    Args:
        linear: the layer; its weight must not change any more, but by loading another
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.repack()

    def forward(self, x: Tensor) -> Tensor:
        if self.native is None or not runs_native(x):
            return F.linear(x, self.weight, self.bias)
        y = self.native(x.reshape(-1, self.in_features), self.bias)
        return y.view(x.shape[:-1] + y.shape[1:])
