"""Interface between a stack of layers and the method that connects them.

::

    state = aggregator.start(y_0)                  # y_0: embedding output
    for l, layer in enumerate(layers):             # l = 0 ... L-1
        x = aggregator.read(state, l)              # input of layer l+1
        state = aggregator.write(state, l, layer(x))   # aggregator.skip(state, l) if LayerDrop skips the layer
    out = aggregator.finish(state)                 # before the final norm of a pre-norm stack

The state is a list of tensors that exists for one forward pass. It is passed as an argument and never stored on the
module. Nothing has to be cleared, and nested calls and activation recomputation are safe. Incremental decoding needs no
cache for it, because the state runs over depth, not over time.

An aggregator defines the layers of its stack with a :class:`~fairseq_deep.core.stack.Layout`:

- usually a whole layer with its residual connections;
- a layer without residual connections or feed-forward sub-layer, which the aggregator replaces;
- with ``split``, a *sub-layer without a residual connection*, F(LN(x)) or F(x): the loop runs over sub-layers, and
  the aggregator does all additions;
- with ``num_evaluations = k``, an encoder layer that is evaluated k times between ``read`` and ``write``::

        outputs = []
        for _ in range(k):
            outputs.append(layer(aggregator.next_input(x, outputs)))
        y = aggregator.combine(x, outputs)
"""

from typing import Any

from torch import Tensor, nn

from fairseq_deep.core.registry import Method, Registry, UsageError
from fairseq_deep.core.stack import Layout, Stack

AGGREGATORS = Registry("--layer-agg")
_BUILD = (
    "{name} takes a Stack, not {given}; build {name}(Stack(layers=6, dim=512)), with "
    "`from fairseq_deep.core.stack import Stack`"
)
_CALL = (
    "{name} cannot be called; use state = start(x), then x = read(state, l) and state = write(state, l, layer(x)) "
    "for each layer l, and finish(state)"
)


class Aggregator(nn.Module, Method):
    """Base class of all aggregators; each instance belongs to one stack.

    Args:
        stack: the stack

    Attributes:
        num_layers: number of reads and writes: the number of layers L, or of modules if layers are split
        dim: width C of the stack
        pre_norm: the layers normalise their input (with a final norm after the stack), not their output
        num_evaluations: evaluations per layer; see :class:`Layout`
        needs_every_layer: layers cannot be removed and renumbered (``--encoder-layers-to-keep``)
        needs_layers: the sides that require at least one layer; a stack of sub-layers does on both
        layerdrop: LayerDrop can skip layers; :meth:`skip` replaces them
        encoder_only: it requires an encoder with the same method; the decoder's part then omits the encoder-only
            computation
        unused_flags: flags of fairseq that have no effect with this method: {flag: (no-op value, end of the error for
            other values)}; "{side}_..." refers to the stack, others are unused if both stacks have the method
        unsupported_flags: flags of fairseq that cannot be used with the method
        running_sum: layers add to one sum, x_{l+1} = x_l + branches, and nothing else reads or writes it
        decoder_flags: the unsupported flags of decoders only
        presets: options of new models that do not conflict with their other options, {option: value}. They are stored
            in a model's flags, and so in its checkpoints; a checkpoint without one was trained with the constructor's
            default
    """

    needs_every_layer = True
    needs_layers: tuple[str, ...] = ()
    layerdrop = False
    encoder_only = False
    running_sum = False
    unused_flags: dict[str, tuple[Any, str]] = {}
    unsupported_flags: tuple[str, ...] = ()
    decoder_flags: tuple[str, ...] = ()
    presets: dict[str, Any] = {}

    def __new__(cls, *args: Any, **options: Any) -> "Aggregator":  # before a subclass reads attributes of the stack
        if args and not isinstance(args[0], Stack):
            raise TypeError(_BUILD.format(name=cls.__name__, given=type(args[0]).__name__))
        return super().__new__(cls, *args, **options)

    def __init__(self, stack: Stack):
        super().__init__()
        self.num_layers = stack.num_modules
        self.dim = stack.dim
        self.pre_norm = stack.pre_norm
        self.num_evaluations = 1
        if self.num_layers < 1 and (stack.side in self.needs_layers or stack.layout.split):
            name = self.prefix if stack.aggregator is None else stack.aggregator.name
            raise UsageError(
                f"--layer-agg {name} requires layers ({stack.side}): use --{stack.side}-layers 1 or more, or another "
                "--layer-agg"
            )

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        """Return the layout of the layers of a stack on *side* for a method with *options*."""
        return Layout()

    def tie(self, other: "Aggregator") -> None:
        """Share with *other*, the aggregator of the other stack, the parameters that the method shares."""

    def matrices(self) -> list[Tensor]:
        """Return the weight matrices (fan_out x fan_in) that an initialisation may fill.

        Other parameters keep their initial values.
        """
        return []

    def compiled(self) -> list[nn.Module]:
        """Return the modules that ``--compile`` compiles in training: modules with many small operations."""
        return []

    def weights(self) -> Tensor | None:
        """Return weights of sums over layers, (sums x entries) or (sums x entries x n), for plots; None if none."""
        return None

    def record(self) -> dict[str, Tensor]:
        """Return scalars for the training log (0-dimensional tensors, by name)."""
        return {}

    def forward(self, *args, **kwargs):
        """Raise `TypeError`: an aggregator acts between layers, through the four methods below."""
        raise TypeError(_CALL.format(name=type(self).__name__))

    def start(self, x: Tensor) -> list[Tensor]:
        """Return a state that holds the embedding output *x* (T x B x C)."""
        return [x]

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        """Return the input (T x B x C) of the layer with the 0-based index *layer*; by default the first tensor."""
        return state[0]

    def next_input(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        """Return the input of the next evaluation of the layer that read *x* and returned *outputs* so far."""
        return x

    def combine(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        """Return the output of the layer that read *x* and returned *outputs*; for several evaluations only."""
        return outputs[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        """Return the state after the layer with the 0-based index *layer* has returned *output* (T x B x C)."""
        raise NotImplementedError

    def skip(self, state: list[Tensor], layer: int) -> list[Tensor]:
        """Return the state after LayerDrop has skipped the layer with the 0-based index *layer*; for *layerdrop*."""
        return state

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        """Return the output y of the last layer written, for memories; that layer returned *output* (T x B x C)."""
        return output

    def finish(self, state: list[Tensor]) -> Tensor:
        """Return the output of the stack (T x B x C), before the final norm; by default the first tensor."""
        return state[0]


class LayerOutputs(Aggregator):
    """Plain stack whose :meth:`finish` reads all layers: the state is y_1 ... y_l, or before layer 1, y_0."""

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        return [output] if layer == 0 else state + [output]
