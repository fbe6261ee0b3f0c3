"""Depth-scaled initialisations of other toolkits, similar to DS-Init (``ds.py``).

``marian``: Xavier, with the bounds of layer l divided by sqrt(l), and separate matrices for queries, keys and values.
``gpt2``: N(0, 0.02^2); the last matrix of a sub-layer is divided by the square root of the number of residual
connections in the stack (Language Models are Unsupervised Multitask Learners, Radford et al., 2019, Section 2.3).
"""

from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError
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

    def __init__(self, stack: Stack, kind: str = "marian"):
        super().__init__(stack)
        if kind not in ("marian", "gpt2"):
            raise UsageError(f"--depth-scaled-kind {kind} is unknown: use marian or gpt2")
        self.kind = kind

    @staticmethod
    def add_args(parser) -> None:
        parser.add_argument("--depth-scaled-kind", metavar="KIND", help="--deep-init depth-scaled: marian or gpt2")

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        if self.kind == "marian":
            nn.init.xavier_uniform_(weight, gain=place.layer**-0.5)
        else:
            ends = place.role == "out_proj" or (place.part, place.role) == ("ffn", "fc2")
            nn.init.normal_(weight, std=0.02 * (self.connections**-0.5 if ends else 1.0))
