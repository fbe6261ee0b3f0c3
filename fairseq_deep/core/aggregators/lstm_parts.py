"""Parts of a depth-wise LSTM step: the gates, and the hidden computation; equations in :mod:`.lstm`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.native.packed import PacksWeight, runs_native
from fairseq_deep.core.xavier import fill_xavier

from .lstm_cell import gated_cell


class Gates(PacksWeight):
    """Input, forget and output gate, as one product with a norm for each gate, and the cell.

    Args:
        in_dim: width of c
        dim: width C of a gate
        forget_bias: initial bias of the forget gate's norm
        biases: add b_i, b_f and b_o, initially 0
    """

    def __init__(self, in_dim: int, dim: int, forget_bias: float, biases: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * dim, in_dim))
        self.bias = nn.Parameter(torch.zeros(3 * dim)) if biases else None
        self.norm_weight = nn.Parameter(torch.empty(3, dim))
        self.norm_bias = nn.Parameter(torch.empty(3, dim))
        for matrix in self.weight.chunk(3):
            nn.init.xavier_uniform_(matrix)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        nn.init.constant_(self.norm_bias[1], forget_bias)

    def make_generation_fast_(self, **_) -> None:
        """Prepare for generation; also called by fairseq."""
        self.repack()

    def products(self, c: Tensor) -> Tensor:
        """Return the inputs of all gates before their norms (T x B x 3C) for *c* (T x B x in_dim)."""
        if self.in_int8 and self.native is not None and runs_native(c):
            return self.native(c.flatten(0, -2), self.bias).view(*c.shape[:-1], -1)
        return F.linear(c, self.weight, self.bias)

    def forward(self, c: Tensor, h: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return Out and Cell (T x B x C each), Eq. (7) and (8), for *c*, *h* and the *cell* of the previous step."""
        return gated_cell(self.products(c), self.norm_weight, self.norm_bias, h, cell)


class Hidden(nn.Module):
    """Hidden computation of one step, Eq. (5) or (6).

    Args:
        in_dim: width of c
        dim: width C of the output
        hidden: width of W_h1's output, before the GLU halves it; None for the 1-layer form, Eq. (5)
        glu: the GLU's gate function, one of ``GLU``
        dropout: dropout on the output
        activation_dropout: dropout on the output of the GLU
        biases: add b_h, or b_h1 and b_h2, initially 0
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        hidden: int | None,
        glu: str,
        dropout: float,
        activation_dropout: float,
        biases: bool = False,
    ):
        super().__init__()
        self.glu = glu
        self.fc1 = nn.Linear(in_dim, hidden or dim, bias=biases)
        self.layer_norm = nn.LayerNorm(hidden or dim)
        self.fc2 = nn.Linear(hidden // 2, dim, bias=biases) if hidden else None
        self.dropout = dropout_of(self, dropout)
        self.activation_dropout = dropout_of(self, activation_dropout)
        fill_xavier(*filter(None, (self.fc1, self.fc2)))

    def forward(self, c: Tensor) -> Tensor:
        """Return h (T x B x C) for *c* (T x B x in_dim)."""
        x = self.layer_norm(self.fc1(c).to(self.layer_norm.weight.dtype))  # under autocast, types can differ
        if self.fc2 is None:
            return self.dropout(F.gelu(x))
        if self.glu == "sigmoid":
            x = F.glu(x, dim=-1)
        else:
            a, b = x.chunk(2, dim=-1)
            x = a * (F.gelu(b) if self.glu == "gelu" else F.silu(b) if self.glu == "swish" else F.relu(b))
        return self.dropout(self.fc2(self.activation_dropout(x)))
