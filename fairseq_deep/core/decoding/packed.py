"""Linear layers in fp32 for decoding on a CPU, with compiled kernels: y = x W^T + b.

The kernels read a copy of W in panels (``native/products.h``). Without kernels, layers do not change.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.native.packed import PacksWeight, runs_native


class PackedLinear(PacksWeight, nn.Linear):
    """Linear layer that uses the kernels if they support its input.

    Args:
        linear: the layer; its weight may only change by loading a state dict
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
