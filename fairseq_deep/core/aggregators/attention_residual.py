"""Attention Residuals: a sub-layer reads an attention over the outputs of all sub-layers below.

Attention Residuals, Kimi Team, 2026 (arXiv 2603.15031). With f_l the sub-layers (with a norm of their input, without
residual connection), v_0 the embedding output and v_i = f_i(h_i):

    h_l = sum_{i=0..l-1} a_il v_i,    a_il = softmax_i( w_l . RMSNorm_l(v_i) )

and once more at the top of the stack, before its final norm. w_l is learned and starts at 0; h_l then starts as the
mean of its sources. In the block form, S successive sub-layers are one source: h_l reads v_0, the sum of the v_i of
each finished block, and the partial sum of its own block unless it is the first sub-layer there.

Names here: ``query[l - 2]`` is w_l and ``gain[l - 2]`` the gain of RMSNorm_l, for l = 2 ... N + 1, where N is the
number of sub-layers and h_{N+1} the output. h_1 only reads v_0 and needs neither.

The paper's models are language models. Here each stack of a translation model has its own attention residuals, and
attention to the source is a sub-layer like any other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator
from .position_sums import append, is_tape, learns, normed_linear, position_sum, read, start_tape


@AGGREGATORS.register("attention-residual")
class AttentionResidual(Aggregator):
    """Attention residuals for one stack of N sub-layers without residual connections.

    When a source is finished, one product computes its logits for all readers; the last reader is the top of the
    stack. An input is one product with all finished sources: see ``position_sums.py``.

    In training, the state is [h, a token, logits, p]: the next input; the finished sources; for each source its logits
    per reader, T x B each, in order; and the sum of the open block, if there is one. Without gradients, the state holds
    the finished sources instead of the token. The output of a layer is h, the input of the next layer.

    Args:
        stack: see :class:`Aggregator`; its layers always normalise their input
        block: sub-layers per block; 1 is the full form

    Shapes:
        query, gain: N x C

    Raises:
        UsageError: a block without sub-layers
    """

    paper = "Kimi Team 2026"
    architectures = {
        "attention_residual_6l": ("-", (6, 6), {}),
        "attention_residual_block_24l24l": ("-", (24, 24), {"attention_residual_block": 6}),
    }
    options = {"block": Option("sub-layers per block; 1 is the full form", Range(1))}
    unused_flags = {"{side}_normalize_before": (True, "always normalises the input of sub-layers: omit it")}

    def __init__(self, stack: Stack, block: int = 1):
        super().__init__(stack)
        self.block = block
        self.eps = 1e-6
        self.query = nn.Parameter(torch.zeros(self.num_layers, self.dim))
        self.gain = nn.Parameter(torch.ones(self.num_layers, self.dim))

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        return Layout(residual=False, split=True)

    def record(self) -> dict[str, Tensor]:
        """Return the L2 norm over all w, which is 0 for plain means."""
        return {"query": self.query.float().norm()}

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()  # x is a transposed view, and results of strided inputs are strided
        if learns(x, self.query, self.gain):
            kept, token = start_tape(x, 1 + self.num_layers // self.block, self.num_layers)
            return [x, token, *self._logits(kept, 0, self.num_layers)]
        return [x, x, *self._logits(widened(x), 0, self.num_layers)]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        dtype, done = state[0].dtype, 1 + layer // self.block  # sources that are already finished
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

    def _column(self, logits: list[Tensor], layer: int, count: int) -> list[Tensor]:
        """Return the logits of the *count* finished sources for the row *layer*."""
        found, end = [], 0
        for number in range(count):
            end += self.num_layers - number * self.block
            found.append(logits[end + layer - self.num_layers])
        return found

    def _logits(self, source: Tensor, first: int, end: int) -> list[Tensor]:
        """Return w . RMSNorm(*source*) for the rows *first* to *end* - 1, T x B each, in the type of *source*."""
        query = self.query[first:end].to(source.dtype) * self.gain[first:end].to(source.dtype)
        return list(normed_linear(source, query, self.eps).unbind(-1))
