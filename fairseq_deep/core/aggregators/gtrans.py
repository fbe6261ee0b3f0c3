"""Encoder of GTrans: layers form groups, and a weighted sum of the groups' top layers is the encoder's output.

GTrans: Grouping and Fusing Transformer Layers for Neural Machine Translation, Yang et al., IEEE/ACM TASLP 2022 (arXiv
2207.14467). With t_1 ... t_G the outputs of the last layers of G successive groups of N layers, at each position:

    H = LN( sum_g w_g t_g )

The decoder part, in which each group of the decoder predicts, is not implemented: the decoder is the plain stack.
Layers are connected as in the plain stack. In a pre-norm stack LN is the stack's final norm, in post-norm it is
``fusion_norm``.

Our choices: w is learned without a softmax and starts at 1/G; N is 3; if N does not divide the depth, the last group is
shorter.

Names here: ``fusion.weight`` is w.
"""

from torch import Tensor, nn

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.stack import Stack

from .base import AGGREGATORS, Aggregator
from .mlrf import WeightedLayers


@AGGREGATORS.register("gtrans")
class GTrans(Aggregator):
    """Fusion of groups of the encoder's layers; the decoder is the plain stack, without parameters.

    The encoder's state is [t_1, ..., t_g, y_l], where y_l is t_g at the end of a group; the decoder's is [y_l].

    Args:
        stack: see :class:`Aggregator`
        group_layers: number N of layers per group

    Shapes:
        fusion.weight: G

    Raises:
        UsageError: a group or the encoder has no layers
    """

    paper = "Yang 2022"
    architectures = {"gtrans_6l": ("pre", (6, 6), {})}
    encoder_only = True
    needs_layers = ("encoder",)
    options = {"group_layers": Option("encoder layers per group", Range(1))}

    def __init__(self, stack: Stack, group_layers: int = 3):
        super().__init__(stack)
        self.group_layers = group_layers
        fuses = stack.side == "encoder"
        self.fusion = WeightedLayers(-(-self.num_layers // group_layers)) if fuses else None
        self.fusion_norm = nn.LayerNorm(self.dim) if fuses and not self.pre_norm else None

    def record(self) -> dict[str, Tensor]:
        """Return the weight of each group."""
        if self.fusion is None:
            return {}
        weights = self.fusion.used_weight().detach()
        return {f"group_{number}": weight for number, weight in enumerate(weights.unbind(), 1)}

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[-1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        if self.fusion is None:
            return [output]
        tops = state[: layer // self.group_layers]  # of the groups below this layer's group
        return tops + [output]

    def finish(self, state: list[Tensor]) -> Tensor:
        if self.fusion is None:
            return state[0]
        x = self.fusion(state)
        if self.fusion_norm is not None:
            x = self.fusion_norm(x.to(self.fusion_norm.weight.dtype))  # under autocast, types can differ
        return x.to(state[-1].dtype)
