"""Half precision: what a method adds up is as exact as its inputs, and overflows only where its result does.

Of other parts, the test files of methods prove it, and of whole models ``test_methods.py``.
"""

import copy

import pytest
import torch

from tests.helpers.aggregators import make, read_path
from tests.helpers.tensors import shake

T, B, C, L = 5, 3, 12, 6
# aggregators with options, and the error of 9 of 10 values in units of eps: half a unit where a sum is rounded once,
# more where something before it is rounded, too
METHODS = {
    "gtrans": ({"group_layers": 1}, 0.2),
    "mlrf": ({}, 0.3),
    "mudd": ({}, 0.45),
    "attention-residual": ({}, 0.45),
    "attention-residual block": ({"block": 2}, 0.5),
    **{f"hyper-connections {kind}": ({"kind": kind, "streams": 2}, 0.45) for kind in ("dynamic", "static", "manifold")},
    **{f"ode {method}": ({"method": method}, 0.55) for method in ("rk2", "rk3", "rk4")},
    **{f"ode {method}": ({"method": method}, 0.9) for method in ("rk2-learned", "rk2-init", "ema")},
    "residual-dual": ({}, 0.75),
    "dlcl": ({}, 0.7),
    "dlcl vector": ({"weight_type": "vector"}, 0.7),
}


def path(aggregator, outputs):
    """What the layers read and the output, where layer after layer returns *outputs*."""
    following = iter(outputs[1:])
    return torch.stack(read_path(aggregator, outputs[0], [lambda _: next(following)] * aggregator.num_layers))


@pytest.mark.parametrize("learns", [True, False], ids=["", "no_grad"])
@pytest.mark.parametrize("size, dtype", [(30, torch.float16), (30, torch.bfloat16), (1e4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", METHODS)
def test_sums_are_as_exact_as_their_inputs(case, size, dtype, learns):
    """Compared with fp64, from the same weights and outputs, which are alike: differences between them count."""
    options, limit = METHODS[case]
    half = shake(make(case.split()[0], L, C, **options), 0.5).to(dtype)
    exact, count = copy.deepcopy(half).double(), half.num_layers * half.num_evaluations + 1
    outputs = (size * (torch.randn(C) + torch.randn(count, T, B, C) / 30)).to(dtype)
    with torch.set_grad_enabled(learns):
        found, wanted = path(half, outputs), path(exact, outputs.double())
    assert found.dtype == dtype
    fits = wanted.abs() < 0.9 * torch.finfo(dtype).max
    assert found[fits].isfinite().all() and fits.double().mean() > 0.3
    error = (found.double() - wanted)[fits].abs() / (wanted[fits].abs() * torch.finfo(dtype).eps + 1e-9)
    assert error.quantile(0.9) < limit
