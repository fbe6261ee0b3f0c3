"""Layer-wise memories: each decoder layer attends to the encoder layer at the same depth.

Layer-Wise Coordination between Encoder and Decoder for Neural Machine Translation, He et al., NeurIPS 2018:

    z_j = y_i,    i = j if M = L,    j = 1 ... M

This is an approximation of the paper: we implement neither its mixed attention (one softmax over source and target) nor
its weight sharing between encoder and decoder. In our reading, y_i is the output of layer i, not its input. If M is not
L, we use the depth-aligned layer, i = round(j L / M) but at least 1; the last decoder layer always attends to the
encoder's output.
"""


from torch import Tensor

from .base import MEMORIES, Memory


def depth_aligned(number: int, count: int, depth: int) -> int:
    """Return the layer of 1 ... *depth* that is nearest to the relative depth number/count; rounds half up."""
    return max(1, (2 * number * depth + count) // (2 * count))


@MEMORIES.register("layerwise")
class Layerwise(Memory):
    """Encoder layers as memories; no parameters.

    Args:
        encoder, decoder: see :class:`Memory`
    """

    paper = "He 2018"
    architectures = {"layerwise_6l": ("post", (6, 6), {})}

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        depth, count = len(outputs) - 1, self.num_memories
        return [outputs[depth_aligned(number + 1, count, depth)] for number in range(count)]
