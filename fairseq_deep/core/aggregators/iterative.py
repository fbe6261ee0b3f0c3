"""Iterative aggregation: a chain of nodes merges the layers of a plain stack one by one.

Exploiting Deep Representations for Neural Machine Translation, Dou et al., EMNLP 2018. With y_l the output of layer l
and AGG as in ``node.py``:

    o_1 = y_1
    o_l = AGG(y_l, o_{l-1})

o_L is the output of the stack. No layer reads an o: the layers are connected as in the plain stack.

Names here: ``nodes[l - 2]`` computes o_l. The wiring is our reading of secondary sources.
"""


from torch import Tensor

from fairseq_deep.core.stack import Stack

from .base import AGGREGATORS
from .node import NodeAggregator


@AGGREGATORS.register("iterative")
class Iterative(NodeAggregator):
    """Iterative aggregation. The state is y_l and o_l of the layer below.

    Args:
        stack: see :class:`Aggregator`
    """

    architectures = {"iterative_6l": ("post", (6, 6), {})}

    def __init__(self, stack: Stack):
        super().__init__(stack, [2] * (stack.num_modules - 1))

    def start(self, x: Tensor) -> list[Tensor]:
        return [x, x]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        if layer == 0:
            return [output, output]
        return [output, self.merge([output, state[1]], layer - 1)]

    def finish(self, state: list[Tensor]) -> Tensor:
        return state[1]
