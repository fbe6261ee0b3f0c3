"""Dynamic DLCL: sums over layers with weights that depend on the newest output, separately at each position.

MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections, Xiao et al., ICML 2025
(arXiv 2502.12170), with one way. The input of layer l+1 combines the outputs y_0 ... y_l (y_0: the embedding output):

    x_{l+1} = sum_{j=0..l} A_j y_j,    A = GELU( RMSNorm(y_l) W_1 ) W_2 + a,    l = 1 ... L

x_{L+1} is the output of the stack, and layer 1 reads y_0. W_1 is C x (l+1), W_2 is (l+1) x (l+1) and a has l+1 entries,
separate for each l. W_1 starts as N(0, 1/C), W_2 as 0 and a as (0, ..., 0, 1), so the stack starts as the plain one.
RMSNorm has no gain.

The paper's models are language models. They have four such sums per layer, for queries, keys, values and the residual
stream; its ablations have one. Here each stack of a translation model has its own sums.

Names here: ``hidden[l - 1]`` has W_1 and ``out[l - 1]`` has W_2 and a. All of them are in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import no_autocast
from fairseq_deep.core.keep_fp32 import KeepFp32, widened
from fairseq_deep.core.stack import Stack

from .bands import bands
from .base import AGGREGATORS, Aggregator
from .position_sums import append, is_tape, learns, normed_linear, position_sum, read, start_tape


@AGGREGATORS.register("mudd")
class Mudd(KeepFp32, Aggregator):
    """Dynamic DLCL for one stack.

    In training, the state is [x, a token] with x the next input: see ``position_sums.py``. Without gradients, it is
    [x, y_0, ..., y_l].

    Args:
        stack: see :class:`Aggregator`

    Shapes:
        hidden[l - 1].weight: (l+1) x C; out[l - 1].weight: (l+1) x (l+1); out[l - 1].bias: l+1
    """

    paper = "Xiao 2025"
    architectures = {
        "mudd_6l": ("pre", (6, 6), {}),
        "mudd_20l": ("pre", (20, 6), {}),
    }

    def __init__(self, stack: Stack):
        super().__init__(stack)
        sizes = range(2, self.num_layers + 2)
        self.hidden = nn.ModuleList(nn.Linear(self.dim, size, bias=False) for size in sizes)
        self.out = nn.ModuleList(nn.Linear(size, size) for size in sizes)
        for hidden, out in zip(self.hidden, self.out):
            nn.init.normal_(hidden.weight, std=self.dim**-0.5)
            nn.init.zeros_(out.weight)
            nn.init.zeros_(out.bias)
            nn.init.ones_(out.bias[-1:])

    # no matrices(): filling W_2 would undo the start as a plain stack

    def fp32_tensors(self) -> list[Tensor]:
        return list(self.parameters())

    def weights(self) -> Tensor:
        """Return a, the part of the weights that all positions share, (L+1) x (L+1); layer 1 reads y_0."""
        size = self.num_layers + 1
        rows = [out.bias.detach().float() for out in self.out]
        rows.insert(0, rows[0].new_ones(1) if rows else torch.ones(1))
        return torch.stack([F.pad(row, (0, size - len(row))) for row in rows])

    def record(self) -> dict[str, Tensor]:
        return bands(self.weights())

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        if self.num_layers > 0 and learns(x, *self.parameters()):
            return [x, start_tape(x, self.num_layers + 1, self.num_layers)[1]]
        return [x, x]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        dtype = state[0].dtype
        if is_tape(state, 1):
            kept, token = append(state[1], output)
            x, token = read(token, self._weights_of(kept, layer))
            return [x.to(dtype), token]
        entries = state[1:] + [output.to(dtype)]
        return [position_sum(self._weights_of(widened(output), layer), entries).to(dtype)] + entries

    def _weights_of(self, newest: Tensor, layer: int) -> Tensor:
        """Return A (T x B x (l+1)) for y_l, the output of the layer with the 0-based index *layer*."""
        out = self.out[layer]
        with no_autocast(newest):
            hidden = F.gelu(normed_linear(newest, self.hidden[layer].weight))
            return F.linear(hidden, out.weight.to(hidden.dtype), out.bias.to(hidden.dtype))
