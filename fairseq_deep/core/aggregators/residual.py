"""Plain stack: each layer reads the output of the layer below, x_{l+1} = y_l.

The residual connections are inside the layers. This is the special case W^(l+1)_l = 1, all other weights 0, of DLCL:
Learning Deep Transformer Models for Machine Translation (Wang et al., 2019), Section 3.
"""


from torch import Tensor

from .base import AGGREGATORS, Aggregator


@AGGREGATORS.register("residual")
class Residual(Aggregator):
    """Plain stack, without parameters; any number of layers may be dropped."""

    needs_every_layer = False
    layerdrop = True
    running_sum = True

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        return [output]
