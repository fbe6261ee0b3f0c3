"""ResiDual: a post-norm path and a pre-norm path through the same sub-layers.

ResiDual: Transformer with Dual Residual Connections, Xie et al., 2023 (arXiv 2304.14802). With F_l the sub-layers
(attention or feed-forward network, without norm and residual connection), N of them in a stack, and y_0 the embedding
output:

    x_0 = r_0 = y_0
    a_l = F_l(x_{l-1})
    x_l = LN_l(x_{l-1} + a_l)          as in post-norm
    r_l = r_{l-1} + a_l                as in pre-norm, not normalised between layers
    output = x_N + LN(r_N)

Names here: ``norms[l - 1]`` is LN_l, ``dual_norm`` is the LN of r_N. Its eps is 1e-7, as in the authors' code. That
code can also scale r to avoid overflow in fp16; we accumulate r in fp32 instead.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator


@AGGREGATORS.register("residual-dual")
class ResidualDual(Aggregator):
    """ResiDual for sub-layers without residual connections. The state is [x, r]; after the last one, [output, r].

    Args:
        stack: see :class:`Aggregator`; its norm placement has no effect

    Shapes:
        x, r: T x B x C; r is fp32 if x is fp16 or bf16
    """

    paper = "Xie 2023"
    architectures = {
        "residual_dual_6l": ("-", (6, 6), {}),
        "residual_dual_18l18l": ("-", (18, 18), {}),
    }
    unused_flags = {"{side}_normalize_before": (False, "has its own norms: omit it")}
    decoder_flags = ("no_decoder_final_norm",)

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(self.num_layers))
        self.dual_norm = nn.LayerNorm(self.dim, eps=1e-7)

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        return Layout(residual=False, split=True, input_norm=False, final_norm=False)

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()  # x is a transposed view, and results of strided inputs are strided
        return [x, widened(x)]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        x, r = state[0], state[1] + output
        x = self.norms[layer](x + output.to(x.dtype))  # under autocast, types can differ
        if layer == self.num_layers - 1:
            x = x + self._norm_of_sum(r)
        return [x.to(state[0].dtype), r]

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return state[0]

    def _norm_of_sum(self, r: Tensor) -> Tensor:
        """Return the LN of *r*, in the type of *r* even if the parameters are in half precision."""
        norm = self.dual_norm
        return F.layer_norm(r, [self.dim], norm.weight.to(r.dtype), norm.bias.to(r.dtype), norm.eps)
