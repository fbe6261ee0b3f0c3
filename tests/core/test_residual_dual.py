"""ResiDual: initial values. Its equations are proven in ``test_aggregators.py``."""

from tests.helpers.aggregators import make


def test_norms_start_as_the_identity():
    dual = make("residual-dual", 3, 7)
    for norm in (*dual.norms, dual.dual_norm):
        assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
    assert not dual.matrices()
