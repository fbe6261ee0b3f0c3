"""What an initialisation is: a rule for each matrix of a finished model, and the residual connection that it needs.

:func:`fairseq_deep.inits.walk.initialise` finds the matrices and tells where they stand. It visits the attention
and feed-forward matrices of all layers, and the embeddings. Norms start at 1 and 0 by themselves, and aggregators have
start weights of their own, which stay unless the method has a rule for them.
"""

from dataclasses import dataclass
from typing import Callable, Optional

from torch import Tensor, nn

from ..registry import Registry

INITS = Registry("--deep-init")


@dataclass(frozen=True)
class Connection:
    """The residual connections that a method needs; see :mod:`fairseq_deep.layers.connection`.

    Attributes:
        kind: "plain", "constant", "vector" or "gate"
        value: start of its factor
        layer_norm: layers have norms
    """

    kind: str = "plain"
    value: float = 1.0
    layer_norm: bool = True


PLAIN = Connection()


@dataclass(frozen=True)
class Place:
    """Where a matrix stands.

    Attributes:
        layer: number of its layer in the stack, from 1
        part: "self_attn", "encoder_attn" or "ffn"
        role: "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2" or (of an average attention) "gate"
    """

    layer: int
    part: str
    role: str


class Init:
    """Base of all methods: the start of one stack.

    A command line flag ``--PREFIX-OPTION`` (PREFIX: *flag_prefix*) sets the constructor's argument OPTION.

    Args:
        side: "encoder" or "decoder"
        encoder_layers, decoder_layers: depth of both stacks
        decoder_sublayers: residual connections of a decoder layer

    Attributes:
        connections: residual connections of the stack
        touches: it fills anything at all
        norms: the norm placements that it can be used with; "none": it is made for layers without norms
        without_residual: it can be used where an aggregator replaces the residual connections
        three_sublayers: its constants are made for decoder layers with two attentions
        counts_layers: layers compute with a constant of the depth, so that none can be dropped from a trained model
        flag_prefix: see above
    """

    touches = True
    norms = ("pre", "post")
    without_residual = False
    three_sublayers = False
    counts_layers = False
    flag_prefix = ""

    def __init__(self, side: str, encoder_layers: int, decoder_layers: int, decoder_sublayers: int = 3):
        self.side = side
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.connections = 2 * encoder_layers if side == "encoder" else decoder_sublayers * decoder_layers

    @staticmethod
    def add_args(parser) -> None:
        """Add the method's flags, without defaults: an architecture's preset must be able to set them."""

    def __str__(self) -> str:
        given = ("side", "encoder_layers", "decoder_layers", "connections")
        own = {name: value for name, value in vars(self).items() if name not in given}
        texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in own.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items())

    def connection(self) -> Connection:
        """The residual connections of the stack's layers."""
        return PLAIN

    def matrix(self, weight: Tensor, place: Place) -> None:
        """Fill *weight* (fan_out x fan_in) in place."""
        raise NotImplementedError

    def embedding(self, weight: Tensor) -> None:
        """Fill an embedding (V x C) in place: N(0, 1/C)."""
        nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def output(self, weight: Tensor) -> None:
        """Fill an output projection that is no embedding's twin (V x C) in place: N(0, 1/C)."""
        nn.init.normal_(weight, std=weight.size(1) ** -0.5)

    def relative_keys(self, weight: Tensor) -> None:
        """Fill the vectors of relative positions (distances x D) in place."""
        nn.init.xavier_uniform_(weight)

    def aggregator_matrix(self, weight: Tensor) -> None:
        """Fill a matrix of the stack's aggregator in place. Default: leave it as it started."""

    def prepare(self, stack: nn.Module) -> Optional[Callable[[], None]]:
        """Make the finished *stack* ready for what the method does in the first training batch. Default: nothing.

        Returns:
            what takes it back, because a checkpoint is loaded; None if there is nothing
        """
