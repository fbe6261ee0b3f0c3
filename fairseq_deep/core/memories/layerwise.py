"""Layer-wise memories: each layer of the decoder attends to the encoder layer at its own depth.

Layer-Wise Coordination between Encoder and Decoder for Neural Machine Translation, He et al., NeurIPS 2018:

    z_j = y_i,    i = j where M = L,    j = 1 ... M

In the manner of that paper: its mixed attention (one softmax over source and target) and its sharing of weights between
encoder and decoder are not part of this, and that y_i is the output of layer i, not its input, is our reading. Where M
is not L, we take the depth-aligned layer, i = round(j L / M) but at least 1, so that the last layer of the decoder
attends to the encoder's output in any case.
"""


from torch import Tensor

from .base import MEMORIES, Memory


def depth_aligned(number: int, count: int, depth: int) -> int:
    """Of the layers 1 ... *depth* the nearest to the relative depth number/count; half is rounded up."""
    return max(1, (2 * number * depth + count) // (2 * count))


@MEMORIES.register("layerwise")
class Layerwise(Memory):
    """Encoder layers as memories; no parameters.

    Args:
        encoder, decoder: see :class:`Memory`
    """

    paper = "He 2018"

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        depth, count = len(outputs) - 1, self.num_memories
        return [outputs[depth_aligned(number + 1, count, depth)] for number in range(count)]
