"""The contract of a memory: what each layer of the decoder attends to.

::

    z_1, ..., z_M = memory(y_0, ..., y_L)        # y_0: embedding output of the encoder

The encoder computes all z once a sentence, applies its final norm (pre-norm) to each, and hands them on.
"""


from torch import Tensor, nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.stack import Stack

MEMORIES = Registry("--decoder-memory")


class Memory(nn.Module, Method):
    """Base of all memories.

    Args:
        encoder: the stack whose outputs are read
        decoder: the stack that attends to them

    Attributes:
        normalises: the memories have norms of their own, so that the stack's final norm is not for them
    """

    normalises = False

    def __init__(self, encoder: Stack, decoder: Stack):
        super().__init__()
        self.num_layers = encoder.layers
        self.num_memories = decoder.layers
        self.dim = encoder.dim

    def record(self) -> dict[str, Tensor]:
        """Scalars for the training log (0-dimensional tensors, by name)."""
        return {}

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        """What the decoder layers attend to.

        Args:
            outputs: y_0 ... y_{L-1} of the encoder's layers, and the output y_L of the stack, each S x B x C
            state: what the encoder's aggregator holds at the end

        Returns:
            M tensors, S x B x C
        """
        raise NotImplementedError
