"""The contract between a stack of layers and the method that connects them.

::

    state = aggregator.start(y_0)                  # y_0: embedding output
    for l, layer in enumerate(layers):             # l = 0 ... L-1
        x = aggregator.read(state, l)              # input of layer l+1
        state = aggregator.write(state, l, layer(x))   # or, where LayerDrop skips the layer: aggregator.skip(state, l)
    out = aggregator.finish(state)                 # before the final norm of a pre-norm stack

The state is a list of tensors that lives for one forward pass. It is passed, never kept on the module, so nothing
has to be cleared, nested calls and activation recomputation are safe, and incremental decoding, which runs over
time while the state runs over depth, needs no cache for it.

What a layer is, an aggregator says with its :class:`~fairseq_deep.core.stack.Layout`:

- usually a whole layer with its residual connections;
- without residual connections or feed-forward sub-layer, where the aggregator does their work;
- with ``split``, a *bare sub-layer* F(LN(x)) or F(x): the loop runs over sub-layers, and the aggregator
  owns all additions;
- with ``num_evaluations = k``, an encoder layer that is evaluated k times, between ``read`` and ``write``::

        outputs = []
        for _ in range(k):
            outputs.append(layer(aggregator.next_input(x, outputs)))
        y = aggregator.combine(x, outputs)
"""

import warnings
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
    """Base of all aggregators; each is made for one stack.

    Args:
        stack: the stack

    Attributes:
        num_layers: how often it is read and written: the number of layers L, or of modules where layers are split
        dim: width C of the stack
        pre_norm: the layers normalise their input (with a final norm after the stack), not their output
        num_evaluations: evaluations of a layer; see :class:`Layout`
        needs_every_layer: layers cannot be removed and renumbered (``--encoder-layers-to-keep``)
        layerdrop: LayerDrop can skip layers; :meth:`skip` says what takes their place
        encoder_only: it cannot be chosen for a decoder alone; where both stacks have it, the decoder's does without
            what only an encoder can do
        unused_flags: flags of fairseq that have no effect with this method: {flag: (no-op value, end of the error for
            other values)}; "{side}_..." is about the stack, others are unused if both stacks have the method
        unsupported_flags: flags of fairseq that cannot be used with the method
        running_sum: layers add to one sum, x_{l+1} = x_l + branches, and nothing else reads or writes it
        decoder_flags: those of them that are about a decoder only
        presets: options that new models have where they go with the rest, {option: value}. They stand in a model's
            flags, and so in its checkpoints; a checkpoint without one was trained with the constructor's default
    """

    needs_every_layer = True
    layerdrop = False
    encoder_only = False
    running_sum = False
    unused_flags: dict[str, tuple[Any, str]] = {}
    unsupported_flags: tuple[str, ...] = ()
    decoder_flags: tuple[str, ...] = ()
    presets: dict[str, Any] = {}

    def __new__(cls, *args: Any, **_: Any) -> "Aggregator":  # before a subclass asks the stack for anything
        if args and not isinstance(args[0], Stack):
            raise TypeError(_BUILD.format(name=cls.__name__, given=type(args[0]).__name__))
        return super().__new__(cls)

    def __init__(self, stack: Stack):
        super().__init__()
        self.num_layers = stack.num_modules
        self.dim = stack.dim
        self.pre_norm = stack.pre_norm
        self.num_evaluations = 1

    def _set_calls(self, value: int) -> None:
        warnings.warn(f"{type(self).__name__}.calls is now called num_evaluations", FutureWarning, stacklevel=3)
        self.num_evaluations = value

    calls = property(lambda self: self.num_evaluations, _set_calls)  # its name in the last release

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        """What the method with *options* makes of the layers of a stack on *side*."""
        return Layout()

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if cls.layout(stack.side, options).split and stack.layers < 1:
            raise UsageError(
                f"--layer-agg {stack.aggregator.name} needs sub-layers: use --{stack.side}-layers 1 or more, "
                f"or --{stack.side}-layer-agg residual"
            )

    def tie(self, other: "Aggregator") -> None:
        """Share with *other*, that of the other stack, what the method shares between the stacks."""

    def matrices(self) -> list[Tensor]:
        """The weight matrices (fan_out x fan_in) that an initialisation may fill; the rest keeps its start values."""
        return []

    def compiled(self) -> list[nn.Module]:
        """The modules whose calls in training ``--compile`` compiles: those with many small operations."""
        return []

    def weights(self) -> Tensor | None:
        """Weights of sums over layers, (sums x entries) or (sums x entries x n), for plots; None if there are none."""
        return None

    def record(self) -> dict[str, Tensor]:
        """Scalars for the training log (0-dimensional tensors, by name)."""
        return {}

    def forward(self, *args, **kwargs):
        """Raise `TypeError`: an aggregator acts between layers, through the four methods below."""
        raise TypeError(_CALL.format(name=type(self).__name__))

    def start(self, x: Tensor) -> list[Tensor]:
        """State that holds the embedding output *x* (T x B x C)."""
        return [x]

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        """Input (T x B x C) of the layer with the 0-based index *layer*."""
        raise NotImplementedError

    def next_input(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        """The input of the next evaluation of the layer that read *x* and returned *outputs* so far."""
        return x

    def combine(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        """The output of the layer that read *x* and returned *outputs*; called with more than one evaluation only."""
        return outputs[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        """State after the layer with the 0-based index *layer* has returned *output* (T x B x C)."""
        raise NotImplementedError

    def skip(self, state: list[Tensor], layer: int) -> list[Tensor]:
        """State after LayerDrop has skipped the layer with the 0-based index *layer*; only with *layerdrop*."""
        return state

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        """What counts as the output y of the last layer that was written, which returned *output* (T x B x C)."""
        return output

    def finish(self, state: list[Tensor]) -> Tensor:
        """Output of the stack (T x B x C), before the final norm of a pre-norm stack."""
        raise NotImplementedError
