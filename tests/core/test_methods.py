"""What holds for every method and option, at random weights: one model of each, and one of each structure of the table.

The properties are in ``tests/helpers/invariances.py``: gradients, loading, incremental decoding, beams that share a
source, padding, activation checkpointing, and lower precision. A new method takes part as soon as it is registered:
so do three toys, which the package does not know, and each of which is as small as its contract allows.
"""

import pytest
import torch
from torch import nn

from fairseq_deep.core.aggregators import AGGREGATORS, Aggregator
from fairseq_deep.core.fields import Option
from fairseq_deep.core.memories import MEMORIES, Memory
from fairseq_deep.core.residuals import RESIDUALS, ResidualConnection
from fairseq_deep.core.stack import Stack
from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.invariances import INVARIANCES
from tests.helpers.methods import LANGUAGES, METHODS, OPTIONS, structure
from tests.helpers.models import POSTNORM, PRENORM
from tests.helpers.tensors import shake

STRUCTURES = {row.name: (row.name, {}) for row in {structure(row): row for row in ARCHITECTURES.values()}.values()}
CASES = {**METHODS, **OPTIONS, **LANGUAGES, **STRUCTURES}
# structures combine methods and options: every twelfth by default, all at night
LATER = [name for number, name in enumerate(STRUCTURES) if number % 12]
CASES["toy aggregator"] = PRENORM, {"encoder_layer_agg": "toy", "decoder_layer_agg": "dlcl"}
CASES["toys"] = POSTNORM, {"layer_agg": "toy", "decoder_memory": "toy", "toy_start": 0.3, "residual": "toy",
                           "decoder_attn": "merged"}  # fmt: skip


class ToyAggregator(Aggregator):
    """x_{l+1} = a y_l + (1 - a) y_{l-1}."""

    def __init__(self, stack: Stack):
        super().__init__(stack)
        self.share = nn.Parameter(torch.tensor(0.7))

    def start(self, x):
        return [x, x]

    def read(self, state: list[torch.Tensor], layer: int):
        return (self.share * state[1] + (1 - self.share) * state[0]).to(state[1].dtype)

    def write(self, state: list[torch.Tensor], layer: int, output):
        return [state[1], output]

    def finish(self, state: list[torch.Tensor]):
        return self.read(state, self.num_layers)


class ToyMemory(Memory):
    """z_j = y_L + b_j y_0."""

    options = {"start": Option("initial b")}

    def __init__(self, encoder: Stack, decoder: Stack, start: float = 0.5):
        super().__init__(encoder, decoder)
        self.weight = nn.Parameter(torch.full((self.num_memories,), start))

    def forward(self, outputs: list[torch.Tensor], state: list[torch.Tensor]):
        return [(outputs[-1] + share * outputs[0]).to(outputs[0].dtype) for share in self.weight.unbind()]


class ToyResidual(ResidualConnection):
    """r = x + s_i F, and from the layer's input once more: r += t x_1 (the norm after it takes the scale)."""

    def __init__(self, stack: Stack, number: int):
        super().__init__(stack, number)
        self.weight = nn.Parameter(torch.full((self.sublayers,), 1.0 / number))
        self.bottom = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, output, sublayer: int, bottom):
        return (x + self.weight[sublayer] * output + self.bottom * bottom).to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def toys():
    """Known as "toy", as by a module in the package's folders."""
    with pytest.MonkeyPatch.context() as patch:
        for registry, method in ((AGGREGATORS, ToyAggregator), (MEMORIES, ToyMemory), (RESIDUALS, ToyResidual)):
            patch.setattr(registry, "_entries", dict(registry._entries))
            registry.register("toy")(method)
        yield


@pytest.mark.parametrize("invariance", INVARIANCES)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.nightly] if case in LATER else [])
                                  for case in CASES])  # fmt: skip
def test_invariance(case, invariance, build, dictionary):
    arch, flags = CASES[case]
    depths = {"encoder_layers": 2 if "msc" in case else 3, "decoder_layers": 2}  # so none can take the other's place

    def make(dropout=0.0, **more):
        model = build(arch, **{**depths, **flags, **more, "dropout": dropout})
        for module in model.modules() if not dropout else ():
            if hasattr(module, "p"):
                module.p = 0.0  # a method's own dropout
        return shake(model, 0.1, around=True)  # zeros at the start would hide what depends on them

    INVARIANCES[invariance](make, dictionary)
