"""Dynamic Linear Combination of Layers (DLCL).

Learning Deep Transformer Models for Machine Translation, Wang et al., ACL 2019, Section 3.

The input of layer l+1 combines the outputs y_0 ... y_l of all layers below (y_0: the embedding output):

    pre-norm   G(y_0, ..., y_l) = sum_k W^(l+1)_k LN(y_k)       Eq. (8)
    post-norm  G(y_0, ..., y_l) = LN( sum_k W^(l+1)_k y_k )     Eq. (9)

Names here: ``weight[l, k]`` is W^(l+1)_k, for k <= l; row L gives the output of the stack. The entries above the
diagonal exist, as in the authors' code and their parameter counts, but are never used. Following that code, y_0 is
not normalised: in pre-norm LN_k acts on y_k for k >= 1, and in post-norm the first combination has no norm:
x_1 = weight[0, 0] * y_0. With *norm_first* both have a norm (``first_norm``), like the printed equations.

LayerDrop (our choice): a skipped layer contributes nothing, and its weight moves to the entry below. The sum of a row's
weights then stays the same, and a stack with W^(l+1)_l = 1 behaves like a plain stack with LayerDrop. An entry of zeros
would cut such a stack, and renormalising the other weights could divide by zero.
"""


import torch
from torch import Tensor, nn

from fairseq_deep.core.compat import is_compiling
from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.fields import PROBABILITY, Option, Range
from fairseq_deep.core.keep_fp32 import KeepFp32
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack

from .bands import bands
from .base import AGGREGATORS, Aggregator
from .layer_sums import PlainSums, TrainingSums
from .running_sums import is_row

STARTS = ("avg", "one", "last")


def _weight_type(value: str) -> str:
    """Check and return the value of ``--dlcl-weight-type``."""
    kind, _, groups = value.partition("_")
    if value in ("scalar", "vector") or (kind == "scalar" and groups.isdigit() and int(groups) > 0):
        return value
    raise UsageError(f"--dlcl-weight-type {value} is unknown: use scalar, scalar_N (N weights per entry) or vector")


def used_weights(weight: Tensor, normalize: bool = False, window: int | None = None) -> Tensor:
    """Return the weights of the sums, n x (L+1) x (L+1): row l, entry k; 0 for entries that it does not read.

    Args:
        weight: the parameter, (L+1) x (L+1) or (L+1) x (L+1) x n
        normalize, window: see :class:`Dlcl`
    """
    size = len(weight)
    window, weight = window or size, weight.view(size, size, -1).permute(2, 0, 1)
    if normalize:
        read = torch.ones(size, size, dtype=torch.bool, device=weight.device).tril().triu(1 - window)
        return torch.softmax(weight.masked_fill(read.logical_not(), float("-inf")), dim=2)
    return weight.tril().triu(1 - window) if window < size else weight.tril()


@AGGREGATORS.register("dlcl")
class Dlcl(KeepFp32, Aggregator):
    """DLCL for one stack.

    The state is that of :class:`TrainingSums`, or without gradients, of :class:`PlainSums`.

    Args:
        stack: see :class:`Aggregator`
        init: initial W: ``avg`` (row l is 1/(l+1)), ``one``, or ``last`` (1 for the newest entry, 0 for the others: the
            stack starts as a plain one, and with *no_norm* this is DenseFormer, Pagliardini et al., 2024); applies
            inside the window and the lower triangle
        fixed: W is not learned (ablations "fix 1/N" and "fix 1" of Table 6; also the dense residual average and sum)
        weight_type: weights of an entry: ``scalar``; ``scalar_N``, where feature i uses weight i mod N; ``vector``,
            one for each feature
        normalize: softmax over a row's weights
        dropout: probability of dropout on each combination
        window: a combination reads only the last *window* entries (a true mask: the others get no gradient)
        no_norm: no LN on the entries (ablation "- layer norm." of Table 6; pre-norm only)
        norm_first: also LN on y_0 in Eq. (8), or on the first combination in Eq. (9)

    Shapes:
        weight: (L+1) x (L+1), or (L+1) x (L+1) x n with n > 1 weights per entry

    Raises:
        UsageError: a value is out of range, N does not divide the width, *no_norm* in a post-norm stack or with
            *norm_first*
    """

    paper = "Wang 2019"
    layerdrop = True
    options = {
        "init": Option("initial weights, avg is 1/(l+1)", STARTS),
        "fixed": Option("keep the weights at their initial values"),
        "weight_type": Option("weights of an entry: scalar, scalar_N (feature i uses weight i mod N) or vector"),
        "normalize": Option("softmax over the weights of a row"),
        "dropout": Option("dropout on each combination", PROBABILITY),
        "window": Option("combine only the last N layer outputs", Range(1)),
        "no_norm": Option("no norm on entries (pre-norm only)"),
        "norm_first": Option("also normalise the embeddings (pre-norm) or first combination (post-norm)"),
    }

    def __init__(
        self,
        stack: Stack,
        init: str = "avg",
        fixed: bool = False,
        weight_type: str = "scalar",
        normalize: bool = False,
        dropout: float = 0.0,
        window: int | None = None,
        no_norm: bool = False,
        norm_first: bool = False,
    ):
        super().__init__(stack)
        num_layers, dim = self.num_layers, self.dim
        if no_norm and not self.pre_norm:
            raise UsageError("--dlcl-no-norm requires a pre-norm stack: post-norm normalises the sum (Eq. 9); omit it")
        if no_norm and norm_first:
            raise UsageError("--dlcl-norm-first is one of the norms that --dlcl-no-norm omits: omit one of them")
        self.init = init
        self.normalize = normalize
        self.window = num_layers + 1 if window is None else min(window, num_layers + 1)
        self._training_sums = TrainingSums(self.window, keeps_entry=stack.layerdrop > 0)
        self._plain_sums = PlainSums(self.window)
        self.groups = self._num_weights(_weight_type(weight_type), dim)
        square = (num_layers + 1, num_layers + 1)
        weight = torch.empty(square if self.groups == 1 else (*square, self.groups))
        if fixed:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)
        self.layer_norms = nn.ModuleList([] if no_norm else [nn.LayerNorm(dim) for _ in range(num_layers)])
        self.first_norm = nn.LayerNorm(dim) if norm_first else None
        self.dropout = dropout_of(self, dropout)
        self.reset_parameters()

    @staticmethod
    def _num_weights(weight_type: str, dim: int) -> int:
        if weight_type == "vector":
            return dim
        groups = int(weight_type.partition("_")[2] or 1)
        if dim % groups:
            raise UsageError(f"--dlcl-weight-type {weight_type}: {groups} does not divide the width {dim} of the stack")
        return groups

    def reset_parameters(self) -> None:
        """Set W to its initial values, 0 outside the window and above the diagonal."""
        size = self.num_layers + 1
        mask = torch.ones(size, size).tril().triu(1 - self.window)
        start = {"avg": mask / mask.sum(dim=1, keepdim=True), "one": mask, "last": torch.eye(size)}[self.init]
        with torch.no_grad():
            self.weight.copy_(start if self.weight.dim() == 2 else start.unsqueeze(-1).expand_as(self.weight))

    def weights(self) -> Tensor:
        return used_weights(self.weight.detach().float(), self.normalize, self.window).permute(1, 2, 0)

    def is_plain(self) -> bool:
        """Return whether W is 1 for the newest entry and 0 for all others, and entries have no norms.

        With a norm on its entries, the stack is not a plain one for any W: the next layer adds to the output of the
        norm, which does not depend on the scale of the layer's output.
        """
        weights = self.weights()
        newest = torch.eye(len(weights), device=weights.device).unsqueeze(-1)
        return len(self.layer_norms) == 0 and torch.equal(weights, newest.expand_as(weights))

    def record(self) -> dict[str, Tensor]:
        return bands(self.weights())

    def start(self, x: Tensor) -> list[Tensor]:
        x = self._first(x) if self.pre_norm else x
        sums = self._training_sums if self._learns(x) else self._plain_sums
        return sums.start(used_weights(self.weight, self.normalize, self.window), x)

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        x = self._sums(state).sum(state, layer)
        if not self.pre_norm:  # Eq. (9)
            x = self._norm(x, layer - 1) if layer > 0 else self._first(x)
        return self.dropout(x)

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        norm = self.layer_norms[layer] if self.pre_norm and self.layer_norms else None  # LN(y_k) of Eq. (8)
        return self._sums(state).append(state, layer + 1, output, norm)

    def skip(self, state: list[Tensor], layer: int) -> list[Tensor]:
        sums = self._sums(state)
        return sums.append(state, layer + 1, sums.newest(state))

    def finish(self, state: list[Tensor]) -> Tensor:
        return self.read(state, self.num_layers)

    def _sums(self, state: list[Tensor]) -> TrainingSums | PlainSums:
        return self._training_sums if is_row(state) else self._plain_sums

    def _first(self, x: Tensor) -> Tensor:
        return x if self.first_norm is None else self.first_norm(x)

    def _learns(self, x: Tensor) -> bool:
        """Return whether sums must store tensors for gradients; compiled code decides for itself."""
        return torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad) and not is_compiling()

    def _norm(self, x: Tensor, index: int) -> Tensor:
        return self.layer_norms[index](x) if self.layer_norms else x
