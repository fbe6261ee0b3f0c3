"""The ODE Transformer: order of accuracy.

Its equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.ode import Ode
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import run

C = 12


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_a_step_of_a_linear_layer_is_the_exponential_to_its_order(order):
    """x' = G x has the solution exp(G): a step of RK2 is I + G + G^2 / 2, and so on."""
    matrix = torch.randn(C, C, dtype=torch.float64)
    eye = term = expected = torch.eye(C, dtype=torch.float64)
    for power in range(1, order + 1):
        term = term @ matrix / power
        expected = expected + term
    aggregator = Ode(Stack(1, C), **({"method": f"rk{order}"} if order > 1 else {"method": "ema", "order": 1}))
    torch.testing.assert_close(run(aggregator, eye.view(C, 1, C), [lambda x: x + x @ matrix]).view(C, C), expected)
