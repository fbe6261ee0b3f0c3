"""Hierarchical aggregation: a node merges each block of layers, and its output is the input of the next block.

Exploiting Deep Representations for Neural Machine Translation, Dou et al., EMNLP 2018. With y_l the output of layer l,
o_i the output of node i, and AGG as in ``node.py``:

    o_1 = AGG(y_1, y_2)
    o_i = AGG(y_{2i-1}, y_{2i}, o_{i-1})

o_i is the input of layer 2i+1, and the last o is the output of the stack.

Names here: ``nodes[i - 1]`` computes o_i. With blocks of N layers it merges y_{(i-1)N+1} to y_{iN}, and o_{i-1}. If N
does not divide the depth, the last block is shorter and contains the remaining layers.

Our reading relies on secondary sources and on the two printed parameter counts. It reproduces both with blocks of two.
The counts do not show whether o_i feeds the next block.
"""


from torch import Tensor

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.stack import Stack

from .base import AGGREGATORS
from .node import NodeAggregator


def _node_inputs(layers: int, block: int) -> list[int]:
    """Return the number of inputs of each node: the layers of its block, and the node below."""
    return [min(block, layers - first) + (1 if first else 0) for first in range(0, layers, block)]


@AGGREGATORS.register("hierarchical")
class Hierarchical(NodeAggregator):
    """Hierarchical aggregation. The state is the input of the open block and the outputs of its layers so far.

    Args:
        stack: see :class:`Aggregator`
        block: number N of layers that a node merges; a stack with fewer layers has one node for all

    Raises:
        UsageError: *block* is below 1
    """

    options = {"block": Option("layers that a node merges", Range(1))}

    def __init__(self, stack: Stack, block: int = 2):
        super().__init__(stack, _node_inputs(stack.num_modules, block))
        self.block = block

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        if (layer + 1) % self.block != 0 and layer + 1 != self.num_layers:
            return state + [output]
        inputs = state[1:] + [output]
        if layer >= self.block:  # the first block reads the embeddings, which are not an input of its node
            inputs = inputs + [state[0]]
        return [self.merge(inputs, layer // self.block)]

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        # at the end of a block the node's output, which memories could not reach otherwise
        return state[-1]
