"""MSC: context over depth within the encoder, and one encoder block for each decoder layer.

Multiscale Collaborative Deep Models for Neural Machine Translation, Wei et al., ACL 2020. The L layers of the encoder
form N blocks; B_n is the output of block n, and with y_0 the embedding output,

    c_0 = y_0,    c_n = GRU(B_n, c_{n-1}),    n = 1 ... N

Each layer of block n gets c_{n-1}, and decoder layer n attends to block n and c_n. The paper does not say how a layer
uses them. As an approximation, we choose

    input of a layer in block n      x + LN_n(c_{n-1})
    memory of decoder layer j        z_j = LN'_j(B_n + c_n),    n = j if M = N

with one GRU cell for all blocks, a norm LN for each block and a norm LN' for each decoder layer. If M is not N, n is
the depth-aligned block, round(j N / M) but at least 1. Residual connections stay.

The two parts require each other: the aggregator ``msc`` runs the encoder, the memory ``msc`` reads its state. In a
decoder, the aggregator is the plain stack, because a context has the length of the source.

Names here: ``cell`` is the GRU, ``context_norms[n - 1]`` is LN_n, ``memory_norms[j - 1]`` is LN'_j.
"""

from typing import Any

from torch import Tensor, nn

from fairseq_deep.core.aggregators.base import AGGREGATORS, Aggregator
from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack

from .base import MEMORIES, Memory
from .layerwise import depth_aligned


def _num_blocks(stack: Stack, blocks: int | None) -> int:
    """Return the number of blocks of the encoder *stack*.

    Raises:
        UsageError: there is no block, or they cannot have equal sizes
    """
    count = stack.decoder_layers if blocks is None else blocks
    given = f"--decoder-layers {count}" if blocks is None else f"--msc-blocks {count}"
    if count < 1:
        raise UsageError(f"{given} must be at least 1 with --layer-agg msc: use 1 or more")
    if stack.layers % count:
        divisors = [n for n in range(1, stack.layers + 1) if stack.layers % n == 0]
        best = min(divisors, key=lambda n: abs(n - count))
        raise UsageError(
            f"{given} does not divide --encoder-layers {stack.layers} into equal blocks for --layer-agg msc: "
            f"use --msc-blocks {best}, or another --encoder-layers"
        )
    return count


@AGGREGATORS.register("msc")
class Msc(Aggregator):
    """Context over depth.

    In an encoder, the state is [x, LN_n(c_{n-1}), c_{n-1}, B_1 + c_1, ..., B_{n-1} + c_{n-1}] within block n; the
    memory ``msc`` reads the last entries. In a decoder it is [x], and there are no parameters.

    Args:
        stack: see :class:`Aggregator`
        blocks: number N of blocks of the encoder; default: the number of decoder layers

    Raises:
        UsageError: *blocks* does not divide the number of layers
    """

    paper = "Wei 2020"
    encoder_only = True
    options = {"blocks": Option("blocks of the encoder (default: the number of decoder layers)", Range(1))}

    def __init__(self, stack: Stack, blocks: int | None = None):
        super().__init__(stack)
        self.num_blocks = 0 if stack.side == "decoder" else _num_blocks(stack, blocks)
        self.block_layers = stack.layers // max(self.num_blocks, 1)
        self.cell = nn.GRUCell(self.dim, self.dim) if self.num_blocks > 0 else None
        self.context_norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(self.num_blocks))

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        # the memories have norms, and nothing else reads the encoder: a final norm would get no gradient
        return Layout(final_norm=side == "decoder")

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        if stack.side == "decoder":
            return
        if other.memory is not None and other.memory.name != "msc":
            raise UsageError(
                f"--layer-agg msc computes contexts that --decoder-memory {other.memory.name} does not read: "
                "add --decoder-memory msc, or use --encoder-layer-agg residual"
            )
        _num_blocks(stack, options.get("blocks"))

    def start(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()  # x is a transposed view, and results of strided inputs are strided
        return [x] if self.cell is None else [x, self._norm(x, 0), x]

    def read(self, state: list[Tensor], layer: int) -> Tensor:
        return state[0] if self.cell is None else state[0] + state[1]

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        if self.cell is None:
            return [output]
        if (layer + 1) % self.block_layers != 0:
            return [output] + state[1:]
        context = self.cell(output.flatten(0, 1), state[2].flatten(0, 1)).view_as(output)  # at each position
        added = self._norm(context, (layer + 1) // self.block_layers)
        return [output, added, context] + state[3:] + [output + context]

    def _norm(self, context: Tensor, block: int) -> Tensor:
        """Normalise the context of *block*; there is no norm after the last block."""
        return self.context_norms[block](context) if block < len(self.context_norms) else context


@MEMORIES.register("msc")
class MscMemory(Memory):
    """Blocks with their contexts as memories, each with its own norm.

    Args:
        encoder, decoder: see :class:`Memory`
    """

    paper = "Wei 2020"
    normalises = True

    def __init__(self, encoder: Stack, decoder: Stack):
        super().__init__(encoder, decoder)
        self.memory_norms = nn.ModuleList(nn.LayerNorm(self.dim) for _ in range(self.num_memories))

    @classmethod
    def check(cls, stack: Stack, other: Stack, options: dict[str, Any]) -> None:
        name = other.aggregator.name if other.aggregator is not None else "residual"
        if name != "msc":
            raise UsageError(
                f"--decoder-memory msc reads contexts that --layer-agg {name} of the encoder does not compute: "
                "add --encoder-layer-agg msc, or use --decoder-memory last"
            )

    def forward(self, outputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        blocks = state[3:]
        count = len(self.memory_norms)
        aligned = (blocks[depth_aligned(number, count, len(blocks)) - 1] for number in range(1, count + 1))
        return [layer_norm(block) for layer_norm, block in zip(self.memory_norms, aligned)]
