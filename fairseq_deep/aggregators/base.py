"""The contract between a stack of layers and the method that connects them.

::

    state = aggregator.start(y_0)                  # y_0: embedding output
    for l, layer in enumerate(layers):             # l = 0 ... L-1
        x = aggregator.read(state, l)              # input of layer l+1
        state = aggregator.write(state, l, layer(x))
    out = aggregator.finish(state)                 # before the final norm of a pre-norm stack

The state is a list of tensors that lives for one forward pass. It is passed, never kept on the module, so nothing
has to be cleared, nested calls and activation recomputation are safe, and incremental decoding, which runs over
time while the state runs over depth, needs no cache for it. A list of tensors is also all that TorchScript needs.
"""

from typing import List

from torch import Tensor, nn

from ..registry import Registry

AGGREGATORS = Registry("--layer-agg")


class Aggregator(nn.Module):
    """Base of all aggregators; each is made for one stack.

    A command line flag ``--NAME-OPTION`` (NAME: *flag_prefix*, or else the registered name) sets the constructor's
    argument OPTION.

    Args:
        num_layers: number of layers L of the stack
        dim: width C of the stack
        pre_norm: the layers normalise their input (with a final norm after the stack), not their output

    Attributes:
        needs_every_layer: the method counts on each layer being run, so that LayerDrop cannot be used
        attention_only: the method replaces residual connections and feed-forward sub-layers, so that layers are their
            attention alone. Then it is also given ``decoder``, ``dropout``, ``activation_dropout`` and ``recompute``.
        flag_prefix: the NAME of its flags where several methods share them
        decoder_options: arguments that do nothing in an encoder
    """

    needs_every_layer = True
    attention_only = False
    flag_prefix = ""
    decoder_options = ()

    def __init__(self, num_layers: int, dim: int, pre_norm: bool):
        super().__init__()
        self.num_layers = num_layers
        self.dim = dim
        self.pre_norm = pre_norm

    @staticmethod
    def add_args(parser) -> None:
        """Add the method's flags, without defaults: an architecture's preset must be able to set them."""

    def tie(self, other: "Aggregator") -> None:
        """Share with *other*, that of the other stack, what the method shares between the stacks."""

    def matrices(self) -> List[Tensor]:
        """The weight matrices (fan_out x fan_in) that an initialisation may fill; the rest keeps its start values."""
        return []

    def start(self, x: Tensor) -> List[Tensor]:
        """State that holds the embedding output *x* (T x B x C)."""
        return [x]

    def read(self, state: List[Tensor], layer: int) -> Tensor:
        """Input (T x B x C) of the layer with the 0-based index *layer*."""
        raise NotImplementedError

    def write(self, state: List[Tensor], layer: int, output: Tensor) -> List[Tensor]:
        """State after the layer with the 0-based index *layer* has returned *output* (T x B x C)."""
        raise NotImplementedError

    def layer_output(self, state: List[Tensor], output: Tensor) -> Tensor:
        """What counts as the output y of the last layer that was written, which returned *output* (T x B x C)."""
        return output

    def finish(self, state: List[Tensor]) -> Tensor:
        """Output of the stack (T x B x C), before the final norm of a pre-norm stack."""
        raise NotImplementedError
