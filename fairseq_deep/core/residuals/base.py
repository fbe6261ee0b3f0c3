"""Interface of residual connections, which combine the input and the output of a sub-layer.

    post-norm  x_{l+1} = LN(r(x_l, F(x_l)))
    pre-norm   x_{l+1} = r(x_l, F(LN(x_l)))

Dropout is part of F. A method may scale the input of F in pre-norm, F(a LN(x_l)). Each layer has one module for the
connections of all its sub-layers.
"""


from torch import Tensor, nn

from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.stack import Stack

RESIDUALS = Registry("--residual")


class ResidualConnection(nn.Module, Method):
    """Base class of all residual connections; an instance has the connections of one layer.

    Args:
        stack: the stack of the layer
        number: number of the layer in the stack, from 1

    Attributes:
        sublayers: number of sub-layers in the layer
        pre_norm: norm placement of the layer; a method may differ from the stack's
        norms: the supported norm placements, of "pre" and "post"
        counts_layers: layers depend on their number or their count, so a trained model cannot drop any layers
        running_sum: the method requires a stack in which all layers add to one sum
        shrinks_layers: branches are smaller in higher layers
        foldable: :meth:`factors` can be folded into the weights of a trained model
        weighs_stream: the connection is r = w x + F(x) in post-norm, with :meth:`stream_weight`
    """

    norms: tuple[str, ...] = ("pre", "post")
    counts_layers = False
    running_sum = False
    shrinks_layers = False
    foldable = False
    weighs_stream = False

    def __init__(self, stack: Stack, number: int):
        super().__init__()
        self.sublayers = len(stack.sublayers)
        self.pre_norm = stack.pre_norm

    def matrices(self) -> dict[str, Tensor]:
        """Return the weight matrices (fan_out x fan_in) that an initialisation may fill, by role."""
        return {}

    def factors(self, sublayer: int) -> tuple[float, float | Tensor]:
        """Return a and b of a *foldable* method: in pre-norm r = x + b F(a LN(x)), in post-norm r = x + b F(x).

        Args:
            sublayer: 0-based index in the layer

        Returns:
            a, and b: a number, or one for each feature (C)

        Raises:
            UsageError: they are not constant yet
        """
        raise NotImplementedError

    def stream_weight(self, sublayer: int) -> float | Tensor:
        """Return the weight w of a method that *weighs_stream*: a number, or one for each feature (C).

        Args:
            sublayer: 0-based index in the layer
        """
        raise NotImplementedError

    def adam_factors(self) -> tuple[float, float]:
        """Return factors of Adam's learning rate and its eps for the parameters of the layer."""
        return 1.0, 1.0

    def scale_input(self, x: Tensor) -> Tensor:
        """Return the input of F for the normalised input LN(x) (T x B x C) in a pre-norm stack."""
        return x

    def forward(self, x: Tensor, output: Tensor, sublayer: int, bottom: Tensor) -> Tensor:
        """Connect.

        Args:
            x: T x B x C, the input of the sub-layer, before a norm
            output: T x B x C, the output F of the sub-layer
            sublayer: its 0-based index in the layer
            bottom: T x B x C, the input of the layer

        Returns:
            r, T x B x C
        """
        raise NotImplementedError
