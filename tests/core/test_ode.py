"""The ODE Transformer: order of accuracy, the decoder's part.

Its equations are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.aggregators.ode import Ode
from fairseq_deep.core.stack import MethodConfig, Stack
from tests.helpers.aggregators import run

C, L = 12, 5
# method: its options, and evaluations of a layer
METHODS = {"rk3": ({}, 3), "rk4": ({}, 4), **dict.fromkeys(("rk2", "rk2-learned", "rk2-init"), ({}, 2))}
METHODS |= {f"ema{order}": ({"order": order}, order) for order in (1, 2, 3, 4)}


def options_of(name):
    return {"method": name.rstrip("1234") if name.startswith("ema") else name, **METHODS[name][0]}


def make(name, history="residual", **more):
    return Ode(Stack(L, C), history=history, **options_of(name), **more)


@pytest.mark.parametrize("name, order", [("ema1", 1), ("rk2", 2), ("rk3", 3), ("rk4", 4)])
def test_a_step_of_a_linear_layer_is_the_exponential_to_its_order(name, order):
    """x' = G x has the solution exp(G): a step of RK2 is I + G + G^2 / 2, and so on."""
    matrix = torch.randn(C, C, dtype=torch.float64)
    eye = term = expected = torch.eye(C, dtype=torch.float64)
    for power in range(1, order + 1):
        term = term @ matrix / power
        expected = expected + term
    aggregator = Ode(Stack(1, C), **options_of(name))
    torch.testing.assert_close(run(aggregator, eye.view(C, 1, C), [lambda x: x + x @ matrix]).view(C, C), expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_decoder_evaluates_once_and_is_its_history(name):
    _, evaluations = METHODS[name]
    assert make(name).num_evaluations == Ode.layout("encoder", options_of(name)).num_evaluations == evaluations
    inner = MethodConfig("dlcl", Dlcl, {"window": 2})
    decoder = Ode(Stack(L, C, side="decoder"), **options_of(name), identity=evaluations > 1, inner=inner)
    assert decoder.num_evaluations == Ode.layout("decoder", options_of(name)).num_evaluations == 1
    assert {key.partition(".")[0] for key in decoder.state_dict()} == {"inner"} and decoder.inner.window == 2
