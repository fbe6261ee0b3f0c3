"""Depth-scaled initialisations of other toolkits, similar to DS-Init (``ds.py``).

``marian``: Xavier, with the bounds of layer l divided by sqrt(l), and separate matrices for queries, keys and values.
``gpt2``: N(0, 0.02^2); the last matrix of a sub-layer is divided by the square root of the number of residual
connections in the stack (Language Models are Unsupervised Multitask Learners, Radford et al., 2019, Section 2.3).
"""

from torch import Tensor, nn

from fairseq_deep.core.fields import Option
from fairseq_deep.core.stack import Stack

from .base import INITS, MatrixLocation
from .xavier import Xavier


@INITS.register("depth-scaled")
class ResidualScaled(Xavier):
    """Depth-scaled initialisation like in Marian or GPT-2.

    Args:
        stack: see :class:`Init`
        kind: "marian" or "gpt2"

    Raises:
        UsageError: *kind* is unknown
    """

    without_residual = False
    paper = ""
    shrinks_layers = True
    options = {"kind": Option("toolkit", ("marian", "gpt2"))}

    def __init__(self, stack: Stack, kind: str = "marian"):
        super().__init__(stack)
        self.kind = kind

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        if self.kind == "marian":
            nn.init.xavier_uniform_(weight, gain=place.layer**-0.5)
        else:
            ends = place.role == "out_proj" or (place.part, place.role) == ("ffn", "fc2")
            nn.init.normal_(weight, std=0.02 * (self.connections**-0.5 if ends else 1.0))
