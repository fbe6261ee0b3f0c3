"""Methods and options that do not go together, or have no such value: one line with the problem and the fix."""

import pytest

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from tests.errors import assert_says, read_model, rows
from tests.helpers.methods import NO_FFN
from tests.helpers.models import make_tagged_dictionary, tiny_flags


@pytest.mark.parametrize("before, command, said", rows("models"))
def test_a_model_is_refused_in_one_line(before, command, said, dictionary):
    words = make_tagged_dictionary(22, 12) if "-language" in command else dictionary
    with pytest.raises(UsageError) as error:
        arch, given = read_model(command)
        narrow = {**tiny_flags(f"transformer_{arch}"), **(NO_FFN if given.get("layer_agg") in ("lstm", "rnn") else {})}
        build_architecture(f"transformer_{arch}", words, **{**narrow, **given})
    assert_says(str(error.value), said)


@pytest.mark.parametrize("name", ["hyper-connections", "attention-residual"])
def test_a_norm_placement_that_only_a_configuration_can_give(name, build):
    with pytest.raises(UsageError, match=f"--decoder-normalize-before has no effect: --layer-agg {name} "):
        build("transformer_prenorm_2l2l_tiny", layer_agg=name, decoder_normalize_before=False)
