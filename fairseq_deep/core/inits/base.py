"""Interface of an initialisation: a rule for each matrix of a finished model, and its residual connections.

:func:`fairseq_deep.core.inits.walk.initialise` finds the matrices and gives their locations. It visits the attention
and feed-forward matrices of all layers, and the embeddings. Norms start at 1 and 0 by default. Aggregators have their
own initial weights, which stay unless the method has a rule for them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.residuals import ResidualConnection
from fairseq_deep.core.stack import Stack

INITS = Registry("--deep-init")


@dataclass(frozen=True)
class MatrixLocation:
    """Location of a matrix in a stack.

    Attributes:
        layer: number of its layer in the stack, from 1
        part: "self_attn", "encoder_attn", "ffn" or "residual"
        role: "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", (of a gated network) "fc_linear", (of a gated or
            average attention) "gate", (of an SSRU) "gate" and "input_proj", or its name in the residual connection;
            Luna's additional matrices have the roles of the queries, keys and values that they compute
    """

    layer: int
    part: str
    role: str


class Init(Method):
    """Base class of all methods; initialises one stack.

    Args:
        stack: the stack

    Attributes:
        stack: see above
        touches: it fills any weights
        norms: the supported norm placements, of "pre" and "post"
        layer_norm: layers have norms
        without_residual: it can be used if an aggregator replaces the residual connections
        connects: it has its own residual connections, see :meth:`connection`
        folds_stream: its connections only weight the stream, which :mod:`fairseq_deep.core.stream_folding` can undo
        three_sublayers: its constants require decoder layers with two attentions
        shrinks_layers: weights are smaller in higher layers, or in deeper stacks, to keep the sum of the branches small
        counts_layers: layers use a constant that depends on the depth, so a trained model cannot drop any layers
    """

    touches = True
    norms = ("pre", "post")
    layer_norm = True
    without_residual = False
    connects = False
    folds_stream = False
    three_sublayers = False
    counts_layers = False
    shrinks_layers = False

    def __init__(self, stack: Stack):
        self.stack = stack

    def __str__(self) -> str:
        own = {name: value for name, value in vars(self).items() if name != "stack"}
        texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in own.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items())

    @property
    def connections(self) -> int:
        """Number of residual connections in the stack."""
        return self.stack.layers * len(self.stack.sublayers)

    def connection(self, number: int) -> ResidualConnection | None:
        """Build the residual connections of the layer *number* (from 1); None: ``--residual`` chooses them."""
        return None

    def matrix(self, weight: Tensor, place: MatrixLocation) -> None:
        """Fill *weight* (fan_out x fan_in) in place."""
        raise NotImplementedError

    def embedding(self, weight: Tensor) -> None:
        """Fill an embedding (V x C) in place: N(0, 1/C)."""
        nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def output(self, weight: Tensor) -> None:
        """Fill an output projection that is not tied to an embedding (V x C) in place: N(0, 1/C)."""
        nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def relative_keys(self, weight: Tensor) -> None:
        """Fill the vectors of relative positions (distances x D) in place."""
        nn.init.xavier_uniform_(weight)

    def aggregator_matrix(self, weight: Tensor) -> None:
        """Fill a matrix of the stack's aggregator in place. Default: keep its initial values."""

    def prepare(self, stack: nn.Module) -> Callable[[], None] | None:
        """Prepare the finished *stack* for computations of the method in the first training batch. Default: none.

        Returns:
            a function that cancels them when a checkpoint is loaded; None if there are none
        """
