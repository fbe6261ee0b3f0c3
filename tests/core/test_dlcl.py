"""DLCL: when it is a plain stack, window.

Its equations are proven in ``test_aggregators.py``, with LayerDrop in ``test_layer_drop.py``, checkpoint keys in
``tests/plugin/test_golden.py`` and ``test_legacy.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.stack import Stack

T, B, C, L = 7, 3, 12, 5


@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
def test_only_the_newest_entry_without_a_norm_is_a_plain_stack(weight_type):
    def make(pre_norm=True, **options):
        return Dlcl(Stack(L, C, pre_norm), weight_type=weight_type, **options)

    last = make(no_norm=True, init="last")
    assert last.is_plain()
    assert make(no_norm=True, init="one", window=1).is_plain()
    assert make(no_norm=True, normalize=True, window=1).is_plain()
    assert not make(no_norm=True).is_plain() and not make(no_norm=True, normalize=True).is_plain()
    assert not make(init="last").is_plain() and not make(False, init="last").is_plain()
    with torch.no_grad():
        last.weight[2, 1] += 1e-6
    assert not last.is_plain()


def test_a_window_drops_the_entries_that_nothing_reads():
    aggregator, y_0 = Dlcl(Stack(L, C), window=2), torch.randn(T, B, C)
    with torch.no_grad():
        state = aggregator.start(y_0)
        for index in range(L):
            state = aggregator.write(state, index, y_0)
    assert len(state) == 1 + 2
