"""Multi-layer representation fusion (MLRF): the decoder attends to a fusion of all encoder layers.

Multi-layer Representation Fusion for Neural Machine Translation, Wang et al., COLING 2018. At the top of the encoder,
separately at each position, one g for all decoder layers replaces the output y_L of the last layer:

    mean        g = 1/L sum_l y_l
    learned     g = sum_l w_l y_l, w = softmax(a), or w itself
    ffn         g = W_2 relu(W_1 [y_1; ..; y_L] + b_1) + b_2
    multi-hop   U = softmax_l(tanh(Y W_1) W_2), V_h = sum_l U_lh y_l, g = W [V_1; ..; V_n]

with [;] concatenation, Y the L x C matrix of the y_l, and n hops. The decoder is the plain stack.

We know the functions from secondary sources, so this is an approximation of the paper. Our choices: ReLU and tanh,
which matrices have biases, the widths, n = 4, all initial values, and the norms. A pre-norm stack normalises the y_l
before it fuses them, like DLCL, and its final norm follows; a post-norm stack normalises g.

Names here: ``fusion.weight`` is w or a; ``fusion.fc1`` and ``fc2`` are W_1 and W_2 of "ffn"; ``fusion.hidden``,
``hops`` and ``out`` are W_1, W_2 and W of "multi-hop".
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import KeepFp32, widened
from fairseq_deep.core.stack import Stack
from fairseq_deep.core.xavier import fill_xavier

from .base import AGGREGATORS, LayerOutputs
from .weighted_sum import weighted_sums

KINDS = ("mean", "learned", "ffn", "multi-hop")
WEIGHTS = ("softmax", "linear")


class WeightedLayers(KeepFp32, nn.Module):
    """Sum over layers with one weight per layer, initially equal.

    Args:
        layers: number L of layers
        learned: learn the weights; otherwise they stay 1/L
        normalise: apply a softmax to the weights
    """

    def __init__(self, layers: int, learned: bool = True, normalise: bool = False):
        super().__init__()
        self.learned, self.normalise = learned, normalise
        weight = torch.full((layers,), 0.0 if normalise else 1.0 / layers)
        if learned:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight, persistent=False)

    def used_weight(self) -> Tensor:
        """Return w, in fp32."""
        return torch.softmax(self.weight, dim=0) if self.normalise else self.weight

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return weighted_sums(self.used_weight().unsqueeze(0), outputs)[0]


class JoinedLayers(nn.Module):
    """Feed-forward network on the concatenation of all layers.

    Args:
        layers: number L of layers
        dim: width C
        hidden: inner width
        dropout: dropout on the inner layer
    """

    def __init__(self, layers: int, dim: int, hidden: int, dropout: float):
        super().__init__()
        self.fc1 = nn.Linear(layers * dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.dropout = dropout_of(self, dropout)
        fill_xavier(self.fc1, self.fc2)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.fc2(self.dropout(F.relu(self.fc1(torch.cat(outputs, dim=-1)))))


class MultiHop(nn.Module):
    """Attention over layers with several hops.

    Args:
        dim: width C
        hidden: width of W_1's output
        hops: number n of hops
    """

    def __init__(self, dim: int, hidden: int, hops: int):
        super().__init__()
        self.hidden = nn.Linear(dim, hidden, bias=False)
        self.hops = nn.Linear(hidden, hops, bias=False)
        self.out = nn.Linear(hops * dim, dim, bias=False)
        fill_xavier(self.hidden, self.hops, self.out)

    def shares(self, layers: Tensor) -> Tensor:
        """Return U (L x T x B x n, at least in fp32) for Y (L x T x B x C)."""
        return torch.softmax(widened(self.hops(torch.tanh(self.hidden(layers)))), dim=0)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        layers = torch.stack(outputs)
        shares = self.shares(layers).to(layers.dtype)
        return self.out(torch.einsum("ltbh,ltbc->tbhc", shares, layers).flatten(-2))


@AGGREGATORS.register("mlrf")
class Mlrf(LayerOutputs):
    """Fusion of the encoder's layers; the decoder is the plain stack, without parameters.

    Args:
        stack: see :class:`Aggregator`; its activation dropout acts in "ffn"
        kind: one of ``KINDS``; "learned" by default
        weights: ("learned") "softmax", the default, or "linear": w itself, from 1/L
        hidden: inner width of "ffn" (default 4 C), or width of W_1's output in "multi-hop" (default C)
        hops: ("multi-hop") number n of hops; default 4

    Raises:
        UsageError: a value is unknown or out of range, an option does not apply to *kind*, or the encoder has no layer
    """

    paper = "Wang 2018"
    architectures = {
        "mlrf_6l": ("pre", (6, 6), {"mlrf_kind": "multi-hop"}),
        "mlrf_ffn_6l": ("pre", (6, 6), {"mlrf_kind": "ffn"}),
    }
    encoder_only = True
    needs_layers = ("encoder",)
    options = {
        "kind": Option("fusion of the encoder's layers", KINDS),
        "weights": Option("weights of learned (default: softmax)", WEIGHTS, needs=("kind", ("learned",))),
        "hidden": Option("inner width of ffn (default: 4 x width) or multi-hop (default: width)", Range(1),
                         needs=("kind", ("ffn", "multi-hop"))),
        "hops": Option("number of hops of multi-hop (default: 4)", Range(1), needs=("kind", ("multi-hop",))),
    }  # fmt: skip

    def __init__(
        self,
        stack: Stack,
        kind: str = "learned",
        weights: str | None = None,
        hidden: int | None = None,
        hops: int | None = None,
    ):
        super().__init__(stack)
        fuses = stack.side == "encoder"
        self.fusion = _fusion(stack, kind, weights, hidden, hops) if fuses else None
        norms = self.num_layers if fuses and self.pre_norm else 0
        self.layer_norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(norms))
        self.final_norm = nn.LayerNorm(self.dim) if fuses and not self.pre_norm else None

    def matrices(self) -> list[Tensor]:
        found: list[Tensor] = []
        if self.fusion is not None:
            found = [part.weight for part in self.fusion.modules() if isinstance(part, nn.Linear)]
        return found

    def record(self) -> dict[str, Tensor]:
        """Return the weight of each layer if it is one number."""
        if not isinstance(self.fusion, WeightedLayers) or not self.fusion.learned:
            return {}
        weights = self.fusion.used_weight().detach()
        return {f"layer_{number}": weight for number, weight in enumerate(weights.unbind(), 1)}

    def finish(self, state: list[Tensor]) -> Tensor:
        if self.fusion is None:
            return state[-1]
        outputs = [norm(output) for norm, output in zip(self.layer_norms, state)] if self.layer_norms else state
        x = self.fusion(outputs)
        if self.final_norm is not None:
            x = self.final_norm(x.to(self.final_norm.weight.dtype))  # under autocast, types can differ
        return x.to(state[-1].dtype)


def _fusion(
    stack: Stack, kind: str, weights: str | None, hidden: int | None, hops: int | None
) -> nn.Module:
    """Build the module that computes g from the y_l."""
    if kind == "mean":
        return WeightedLayers(stack.layers, learned=False)
    if kind == "learned":
        return WeightedLayers(stack.layers, normalise=weights != "linear")
    if kind == "ffn":
        return JoinedLayers(stack.layers, stack.dim, hidden or 4 * stack.dim, stack.activation_dropout)
    return MultiHop(stack.dim, hidden or stack.dim, hops or 4)
