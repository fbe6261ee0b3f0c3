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
from torch import Tensor, nn

from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator
from .position_sums import append, is_tape, learns, normed_linear, position_sum, read, start_tape, widened


@AGGREGATORS.register("attention-residual")
class AttentionResidual(Aggregator):
    """Attention residuals for one stack of N bare sub-layers.

    The logits of a source for all that are going to read it are one product, when the source is finished; the last
    reader is the top of the stack. An input is one product with all finished sources: see ``position_sums.py``.

    In training, the state is [h, a token, logits, p]: the next input; the finished sources; for each of them its logits
    by reader, T x B each, one after the other; and the sum of the open block, if one is open. Without gradients, the
    finished sources stand in the place of the token. What counts as the output of a layer is h, the input of the next.

    Args:
        stack: see :class:`Aggregator`; its layers normalise their input in any case
        block: sub-layers a block; 1 is the full form

    Shapes:
        query, gain: N x C

    Raises:
        UsageError: a block without sub-layers
    """

    paper = "Kimi Team 2026"
    unused_flags = {"{side}_normalize_before": (True, "always normalises the input of sub-layers: omit it")}

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
        if learns(x, self.query, self.gain):
            kept, token = start_tape(x, 1 + self.num_layers // self.block, self.num_layers)
            return [x, token, *self._logits(kept, 0, self.num_layers)]
        return [x, x, *self._logits(widened(x), 0, self.num_layers)]

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[0]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        dtype, done = state[0].dtype, 1 + layer // self.block  # sources that are finished before
        if layer % self.block > 0:  # a block is open
            output = state[-1] + output
            state = state[:-1]
        tape = is_tape(state, 1)
        sources, logits = (state[1:2], state[2:]) if tape else (state[1 : 1 + done], state[1 + done :])
        closes = (layer + 1) % self.block == 0
        if tape and closes:
            source, token = append(sources[0], output)
            sources = [token]
        else:
            source = widened(output)
        own = self._logits(source, layer, self.num_layers if closes else layer + 1)
        weights = torch.softmax(torch.stack([*self._column(logits, layer, done), own[0]], dim=-1), dim=-1)
        if not tape:
            h = position_sum(weights, [*sources, output])
            sources = [*sources, output] if closes else sources
        elif closes:
            h, token = read(sources[0], weights)
            sources = [token]
        else:
            finished, newest = weights.split([done, 1], dim=-1)
            h, token = read(sources[0], finished)
            h, sources = torch.addcmul(h, newest, source), [token]
        rest = own[1:] if closes else [output]
        return [h.to(dtype), *sources, *logits, *rest]

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return state[0]

    def finish(self, state: list[Tensor]) -> Tensor:
        return state[0]

    def _column(self, logits: list[Tensor], layer: int, count: int) -> list[Tensor]:
        """Those of the *count* finished sources for the row *layer*."""
        found, end = [], 0
        for number in range(count):
            end += self.num_layers - number * self.block
            found.append(logits[end + layer - self.num_layers])
        return found

    def _logits(self, source: Tensor, first: int, end: int) -> list[Tensor]:
        """w . RMSNorm(*source*) for the rows *first* to *end* - 1, T x B each, in the type of *source*."""
        query = self.query[first:end].to(source.dtype) * self.gain[first:end].to(source.dtype)
        return list(normed_linear(source, query, self.eps).unbind(-1))
