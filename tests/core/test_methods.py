"""What holds for every method and option, at random weights: one model of each, and one of each structure of the table.

The properties are in ``tests/helpers/invariances.py``: gradients, loading, incremental decoding, beams that share a
source, padding, activation checkpointing, and lower precision. A new method takes part as soon as it is registered:
so do those of ``tests/helpers/toy_methods.py``, which the package does not know.
"""

import pytest

from fairseq_deep.plugin.architectures import ARCHITECTURES
from tests.helpers.invariances import INVARIANCES
from tests.helpers.methods import LANGUAGES, METHODS, OPTIONS, structure
from tests.helpers.models import POSTNORM, PRENORM
from tests.helpers.tensors import shake
from tests.helpers.toy_methods import TOYS

STRUCTURES = {row.name: (row.name, {}) for row in {structure(row): row for row in ARCHITECTURES.values()}.values()}
CASES = {**METHODS, **OPTIONS, **LANGUAGES, **STRUCTURES}
# structures combine methods and options: every twelfth by default, all at night
LATER = [name for number, name in enumerate(STRUCTURES) if number % 12]
CASES["toy aggregator"] = PRENORM, {"encoder_layer_agg": "toy", "decoder_layer_agg": "dlcl"}
CASES["toys"] = POSTNORM, {"layer_agg": "toy", "decoder_memory": "toy", "toy_start": 0.3, "residual": "toy",
                           "decoder_attn": "merged"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def toys():
    """Known as "toy", as by a module in the package's folders."""
    with pytest.MonkeyPatch.context() as patch:
        for registry, method in TOYS:
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
