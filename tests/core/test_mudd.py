"""Dynamic DLCL (one-way MUDDFormer): initial values.

Its equation, and that it starts as the plain stack, are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.mudd import Mudd
from fairseq_deep.core.stack import Stack


def test_initial_values():
    aggregator = Mudd(Stack(20, 256))
    assert [tuple(hidden.weight.shape) for hidden in aggregator.hidden] == [(size, 256) for size in range(2, 22)]
    assert aggregator.hidden[-1].weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert not any(out.weight.any() for out in aggregator.out) and not aggregator.matrices()
    assert torch.equal(aggregator.weights(), torch.eye(21))
    record = {name: value.item() for name, value in aggregator.record().items()}
    assert record["newest"] == 1 and record["previous"] == record["older"] == 0
    assert torch.equal(Mudd(Stack(0, 7)).weights(), torch.ones(1, 1))
