"""Attention Residuals: initial values and what the log shows.

Their equations are proven in ``test_aggregators.py``.
"""

import pytest
from torch import nn

from tests.helpers.aggregators import make

C, L = 7, 3


def test_initial_values_and_the_norm_of_the_queries_in_the_log():
    attention = make("attention-residual", L, C, side="decoder")
    assert attention.query.eq(0).all() and attention.gain.eq(1).all()
    assert attention.record()["query"] == 0
    nn.init.constant_(attention.query, 2.0)
    assert attention.record()["query"].item() == pytest.approx(2 * (3 * L * C) ** 0.5)
