"""Every pair of methods of two axes, and of a method and an option of layers, works or is refused with the fix."""

import itertools

import pytest

from fairseq_deep.core.description import AXES
from fairseq_deep.core.registry import UsageError
from tests.helpers.methods import NEEDS
from tests.helpers.models import make_batch
from tests.helpers.tensors import shake

CURES = ("use ", "omit ", "add ", "make ")
OPTIONS = [
    {"relative_positions": 2}, {"rotary_positions": True}, {"qk_norm": True}, {"attention_gate": "heads"},
    {"decoder_kv_heads": 1}, {"sub_norm": True}, {"norm": "rms"}, {"ffn": "swiglu"}, {"value_residual": True},
    {"encoder_layerdrop": 0.5}, {"checkpoint_activations": True}, {"layernorm_embedding": True},
    {"share_all_embeddings": True}, {"decoder_learned_pos": True}, {"no_cross_attention": True},
]  # fmt: skip


def names_of(axis):
    """The methods of *axis*; of an encoder's attentions without the plain one, which all other pairs have."""
    registry, plain = AXES[axis]
    return [name for name in registry.names() if axis != "encoder_attn" or name != plain]


def pairs():
    for first, second in itertools.combinations(AXES, 2):
        for names in itertools.product(names_of(first), names_of(second)):
            yield dict(zip((first, second), names))
    methods = [{axis: name} for axis in AXES for name in names_of(axis)]
    for number, option in enumerate(OPTIONS):
        for other in (*methods, *OPTIONS[:number]):
            yield {**option, **other}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 19], ids=["all", "sample"])
@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
def test_every_pair_works_or_is_refused(norm, every, dictionary, build):
    works = refused = 0
    batch = make_batch(dictionary)
    for flags in itertools.islice(pairs(), 0, None, every):
        for given in list(flags.values()):
            flags = {**NEEDS.get(given, {}), **flags}
        try:
            model = build(f"transformer_{norm}_2l2l_tiny", **flags).train()
        except UsageError as error:
            text = str(error)
            assert "\n" not in text and "--" in text and any(cure in text for cure in CURES), text
            refused += 1
            continue
        output = shake(model, 0.02, around=True)(*batch)[0]  # from where no gate is closed
        assert output.isfinite().all(), flags
        output.square().mean().backward()
        skips = {"encoder_layerdrop", "no_cross_attention"} & {*flags}
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None and not skips]
        assert not missing, (flags, missing)
        works += 1
    assert works > 400 / every and refused > 100 / every
