"""Interface of memories, which decoder layers attend to.

::

    z_1, ..., z_M = memory(y_0, ..., y_L)        # y_0: embedding output of the encoder

The encoder computes all z once per sentence, applies its final norm (pre-norm) to each, and passes them to the decoder.
"""


from torch import Tensor, nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.stack import Stack

MEMORIES = Registry("--decoder-memory")


class Memory(nn.Module, Method):
    """Base class of all memories.

    Args:
        encoder: the stack that computes the outputs
        decoder: the stack that attends to the memories

    Attributes:
        normalises: the memories have their own norms, and the encoder's final norm is not applied to them
    """

    normalises = False

    def __init__(self, encoder: Stack, decoder: Stack):
        super().__init__()
        self.num_layers = encoder.layers
        self.num_memories = decoder.layers
        self.dim = encoder.dim

    def record(self) -> dict[str, Tensor]:
        """Return scalars for the training log (0-dimensional tensors, by name)."""
        return {}

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        """Compute the memories of the decoder layers.

        Args:
            outputs: y_0 ... y_{L-1} of the encoder's layers, and the output y_L of the stack, each S x B x C
            state: the final state of the encoder's aggregator

        Returns:
            M tensors, S x B x C
        """
        raise NotImplementedError
