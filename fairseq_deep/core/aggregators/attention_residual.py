"""Attention Residuals: the input of a sub-layer is an attention over the outputs of all sub-layers below.

Attention Residuals, Kimi Team, 2026 (arXiv 2603.15031). With f_l the sub-layers (with a norm of their input, without
residual connection), v_0 the embedding output and v_i = f_i(h_i):

    h_l = sum_{i=0..l-1} a_il v_i,    a_il = softmax_i( w_l . RMSNorm_l(v_i) )

and once more at the top of the stack, before its final norm. w_l is learned and starts at 0, so that h_l starts as the
mean of what it reads. In the block form, S successive sub-layers are one source: h_l reads v_0, the sums of the v_i of
all finished blocks, and that of its own block so far, if it is not the first there.

Names here: ``query[l - 2]`` is w_l and ``gain[l - 2]`` the gain of RMSNorm_l, for l = 2 ... N + 1, where N is the
number of sub-layers and h_{N+1} the output. h_1 reads v_0 alone and needs neither.

The paper's models are decoders of language models. Here each stack of a translation model has attention residuals of
its own, and attentions to the source are sub-layers like others.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import no_autocast
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product in the type of *x*; autocast would lower it."""
    with no_autocast(x):
        return F.linear(x, weight)


def _mix(logits: list[Tensor], sources: list[Tensor]) -> Tensor:
    """sum_i softmax_i(logits) sources_i, added up in the type of the logits.

    A sum over stacked sources would keep a copy of them for the backward pass; this keeps references.

    Args:
        logits: T x B each
        sources: T x B x C each
    """
    weights = torch.softmax(torch.stack(logits), dim=0).unsqueeze(-1).unbind(0)
    total = weights[0] * sources[0]
    for index in range(1, len(sources)):
        total = total + weights[index] * sources[index]
    return total


@AGGREGATORS.register("attention-residual")
class AttentionResidual(Aggregator):
    """Attention residuals for one stack of N bare sub-layers.

    The state is [h, v_0, e_0, v_1, e_1, ..., p]: the next input h; each finished source with its logits for all that
    are going to read it (T x B x readers; the last reader is the top of the stack), which are one product; and the sum
    of the open block, if one is open. What counts as the output of a layer is h, the input of the next.

    Args:
        stack: see :class:`Aggregator`; its layers normalise their input in any case
        block: sub-layers a block; 1 is the full form

    Shapes:
        query, gain: N x C

    Raises:
        UsageError: a block without sub-layers
    """

    paper = "Kimi Team 2026"
    unused_flags = {"{side}_normalize_before": (True, "always normalises the input of sub-layers: leave it out")}

    def __init__(self, stack: Stack, block: int = 1):
        super().__init__(stack)
        if block < 1:
            raise UsageError(
                f"--attention-residual-block {block} leaves no sub-layer in a block: use 1 (the full form) or more"
            )
        self.block = block
        self.eps = 1e-6
        self.query = nn.Parameter(torch.zeros(self.num_layers, self.dim))
        self.gain = nn.Parameter(torch.ones(self.num_layers, self.dim))

    @staticmethod
    def add_args(parser) -> None:
        parser.add_argument("--attention-residual-block", type=int, metavar="S",
                            help="attention residuals: sub-layers a block (default: 1, the full form)")  # fmt: skip

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        return Layout(residual=False, split=True)

    def record(self) -> dict[str, Tensor]:
        """L2 norm over all w: how far the attentions are from plain means."""
        return {"query": self.query.float().norm()}

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()  # a transposed view: without this, all that is computed from it would be strided, too
        return [x, x, self._logits(x, 0, self.num_layers)]

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[0]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        finished = state[1:]
        if layer % self.block > 0:  # a block is open
            finished = state[1:-1]
            output = state[-1] + output
        closes = (layer + 1) % self.block == 0
        own = self._logits(output, layer, self.num_layers if closes else layer + 1)
        sources, logits = [output], [own[:, :, 0]]
        for index in range(0, len(finished), 2):
            sources.append(finished[index])
            logits.append(finished[index + 1][:, :, layer - self.num_layers])
        h = _mix(logits, sources).to(state[0].dtype)
        return [h] + finished + ([output, own] if closes else [output])

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return state[0]

    def finish(self, state: list[Tensor]) -> Tensor:
        return state[0]

    def _logits(self, source: Tensor, first: int, end: int) -> Tensor:
        """w . RMSNorm(*source*) for the rows *first* to *end* - 1, T x B x rows, in fp32 where that is more."""
        if source.dtype == torch.float16 or source.dtype == torch.bfloat16:
            source = source.float()
        query = self.query[first:end].to(source.dtype) * self.gain[first:end].to(source.dtype)
        return _linear(source, query) * torch.rsqrt(source.pow(2).mean(dim=-1, keepdim=True) + self.eps)
