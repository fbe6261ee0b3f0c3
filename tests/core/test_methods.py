"""What holds for every method and option, at random weights: one model of each, and one of each structure of the table.

The properties are in ``tests/helpers/invariances.py``: gradients, loading, incremental decoding, beams that share a
source, padding, activation checkpointing, and lower precision. A new method takes part as soon as it is registered.
"""

import pytest
import torch

from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.invariances import INVARIANCES
from tests.helpers.methods import LANGUAGES, METHODS, OPTIONS, structure

STRUCTURES = {row.name: (row.name, {}) for row in {structure(row): row for row in ARCHITECTURES.values()}.values()}
CASES = {**METHODS, **OPTIONS, **LANGUAGES, **STRUCTURES}
# structures combine methods and options: every twelfth by default, all at night
LATER = [name for number, name in enumerate(STRUCTURES) if number % 12]


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
        with torch.no_grad():
            for parameter in model.parameters():  # zeros at the start would hide what depends on them
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    INVARIANCES[invariance](make, dictionary)
