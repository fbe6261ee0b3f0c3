"""The encoder of GTrans: initial values. Its equation is proven in ``test_aggregators.py``."""

import pytest

from fairseq_deep.core.aggregators.gtrans import GTrans
from fairseq_deep.core.stack import Stack


def test_groups_start_with_equal_weights_and_decoders_have_none():
    aggregator = GTrans(Stack(7, 12))
    assert aggregator.fusion.weight.tolist() == pytest.approx([1 / 3] * 3) and aggregator.fusion_norm is None
    assert {name: value.item() for name, value in aggregator.record().items()} == pytest.approx(
        {f"group_{number}": 1 / 3 for number in (1, 2, 3)}
    )
    decoder = GTrans(Stack(7, 12, side="decoder"))
    assert not list(decoder.parameters()) and not decoder.record()
