"""Every aggregator alone against its equations, values and gradients; when it is the plain stack.

Whole models, depth-wise LSTMs and multiscale collaboration are in ``test_whole_models.py``.
"""

import functools
import itertools

import pytest
import torch

from fairseq_deep.core.aggregators import AGGREGATORS
from tests.helpers.aggregators import B, C, T, check_equation, make, make_layers, run
from tests.helpers.models import TINY
from tests.helpers.paths import ROOT
from tests.helpers.tensors import DOUBLE, shake
from tests.reference.naive_aggregators import path


def grid(**values):
    """All combinations of these options."""
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


RUNGE_KUTTA = ("rk2", "rk3", "rk4", "rk2-learned", "rk2-init")
SCHEMES = [*grid(method=RUNGE_KUTTA), *grid(method=["ema"], order=[1, 2, 3, 4])]
FUSIONS = [{"kind": "mean"}, *grid(kind=["learned"], weights=["softmax", "linear"]), {"kind": "ffn"},
           {"kind": "ffn", "hidden": 5}, {"kind": "multi-hop"}, {"kind": "multi-hop", "hidden": 7, "hops": 1},
           {"kind": "multi-hop", "hops": 3}]  # fmt: skip
ROUTINGS = [{"iterations": 3}, {"iterations": 1, "capsules": 2}, {"iterations": 2, "capsules": 3, "hidden": 5},
            {"iterations": 4, "capsules": 1, "hidden": 9}]  # fmt: skip
OPTIONS = {  # what changes the equation, and depths: those that blocks divide and do not divide
    "residual": [(3, {})],
    "dlcl": [
        *((5, options) for options in grid(weight_type=["scalar", "scalar_3", "vector"], normalize=[False, True],
                                           window=[None, 1, 2], norm_first=[False, True])),
        *((5, {"fixed": True, "no_norm": True, "init": init}) for init in ("avg", "one")),
    ],  # fmt: skip
    "hierarchical": [
        *((depth, {}) for depth in range(1, 8)),
        *((depth, {"block": block}) for block in (1, 3, 9) for depth in (1, 4, 6)),
    ],
    "iterative": [(depth, {}) for depth in (1, 2, 5)],
    "linear": [(depth, {}) for depth in (1, 2, 5)],
    "mudd": [(depth, {}) for depth in (0, 1, 4)],
    "residual-dual": [(3, {})],
    "attention-residual": [(3, {}), *((3, {"block": block}) for block in (1, 2, 4, 6, 20))],
    "hyper-connections": [(2, row) for row in grid(kind=["dynamic", "static", "manifold"], streams=[1, 2, 4])],
    "gtrans": [(5, row) for row in grid(group_layers=[1, 2, 3, 5, 8])],
    "mlrf": [(4, row) for row in FUSIONS],  # a fourth is exact in fp32
    "routing": [(3, {"kind": kind, **row}) for kind in ("dynamic", "em") for row in ROUTINGS],
    "ode": [
        *((5, {**row, "history": history}) for row in SCHEMES for history in ("residual", "dlcl")),
        *((5, {**row, "history": "dlcl", "identity": True}) for row in SCHEMES if row.get("order") != 1),
    ],
}
CASES = [
    pytest.param(name, depth, options, side, norm, id=f"{name}-{depth}-{options}-{side}-{norm}".replace("'", ""))
    for name, rows in OPTIONS.items()
    for (depth, options), side, norm in itertools.product(rows, ("encoder", "decoder"), TINY)
    if norm == "pre" or not {"no_norm", "identity"} & options.keys()
]
SPLIT = ("residual-dual", "attention-residual", "hyper-connections")


def test_every_aggregator_is_tested():
    """Here, or in a file of its own."""
    alone = {name for name in AGGREGATORS.names() if (ROOT / f"tests/core/test_{name.replace('-', '_')}.py").exists()}
    assert {*AGGREGATORS.names()} - {*OPTIONS} - alone == {"rnn", "msc"}, "which whole models have"


@pytest.mark.parametrize("name, depth, options, side, norm", CASES)
def test_values_and_gradients_equal_the_equations(name, depth, options, side, norm):
    check_equation(name, lambda *inputs: path(name, *inputs, side, **options), depth, norm, side, **options)


STARTS = [
    *((norm, name, {}) for norm in TINY for name in ("mudd", "linear")), ("pre", "gtrans", {"group_layers": 3}),
    ("pre", "dlcl", {"init": "last", "no_norm": True}), ("pre", "ode", {"method": "ema", "order": 1}),
    *(("pre", "hyper-connections", row) for row in grid(kind=["dynamic", "static", "manifold"], streams=[1, 4])),
]  # fmt: skip


@pytest.mark.parametrize("norm, name, options", STARTS, ids=str)
def test_it_starts_as_the_plain_stack(norm, name, options):
    """Also DenseFormer, a DLCL that reads the newest entry; streams of hyper-connections start as residual sums."""
    aggregator = make(name, 3, C, norm, **options).double()
    y_0 = torch.randn(T, B, C, **DOUBLE)
    layers = make_layers(aggregator.num_layers, C)
    expected = functools.reduce(lambda x, layer: layer(x) + x * (name in SPLIT), layers, y_0)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(run(aggregator, y_0, layers), expected, rtol=1e-7, atol=1e-7)
    if list(shake(aggregator).parameters()):
        assert not torch.allclose(run(aggregator, y_0, layers), expected, rtol=0.01)


@pytest.mark.parametrize("weight_type", ["scalar", "scalar_3", "vector"])
def test_only_a_dlcl_of_the_newest_entry_without_a_norm_is_a_plain_stack(weight_type):
    def make_dlcl(norm="pre", **options):
        return make("dlcl", 5, C, norm, weight_type=weight_type, **options)

    last = make_dlcl(no_norm=True, init="last")
    assert last.is_plain()
    assert make_dlcl(no_norm=True, init="one", window=1).is_plain()
    assert make_dlcl(no_norm=True, normalize=True, window=1).is_plain()
    assert not make_dlcl(no_norm=True).is_plain() and not make_dlcl(no_norm=True, normalize=True).is_plain()
    assert not make_dlcl(init="last").is_plain() and not make_dlcl("post", init="last").is_plain()
    with torch.no_grad():
        last.weight[2, 1] += 1e-6
    assert not last.is_plain()


@torch.no_grad()
def test_a_window_of_dlcl_drops_the_entries_that_nothing_reads():
    aggregator, y_0 = make("dlcl", 5, C, window=2), torch.randn(T, B, C)
    state = aggregator.start(y_0)
    for index in range(5):
        state = aggregator.write(state, index, y_0)
    assert len(state) == 1 + 2


@pytest.mark.parametrize("name", sorted({*OPTIONS} - {"gtrans", "mlrf", "routing", *SPLIT}))
def test_a_stack_without_layers_passes_the_embeddings_on(name):
    x = torch.randn(T, B, C)
    torch.testing.assert_close(run(make(name, 0, C), x, []), x)
