"""Multi-layer representation fusion: limits, initial values.

Its equations, and that the decoder is the plain stack, are proven in ``test_aggregators.py``.
"""

import pytest
import torch

from fairseq_deep.core.aggregators.mlrf import Mlrf
from fairseq_deep.core.stack import Stack
from tests.helpers.tensors import randomise

T, B, C, L = 3, 2, 12, 5
KINDS = ("mean", "learned", "ffn", "multi-hop")
either_norm = pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])


@either_norm
def test_learned_weights_start_as_the_mean_and_can_choose_the_last_layer(pre_norm):
    state = list(torch.randn(L, T, B, C).unbind())
    mean = Mlrf(Stack(L, C, pre_norm), kind="mean").finish(state)
    for weights in ("softmax", "linear"):
        aggregator = Mlrf(Stack(L, C, pre_norm), weights=weights)
        torch.testing.assert_close(aggregator.finish(state), mean)
    with torch.no_grad():
        aggregator.fusion.weight.copy_(torch.eye(L)[-1])
    torch.testing.assert_close(aggregator.finish(state), torch.nn.functional.layer_norm(state[-1], (C,)))


def test_hops_share_all_layers_out():
    """U sums to 1 over layers; equal layers are their own mean, for each hop."""
    fusion = randomise(Mlrf(Stack(L, C), kind="multi-hop", hops=3)).fusion
    layers = torch.randn(L, T, B, C)
    expected = fusion.out(layers[0].repeat(1, 1, 3))
    torch.testing.assert_close(fusion([layers[0]] * L), expected, rtol=1e-4, atol=1e-4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        total = fusion.to(dtype).shares(layers.to(dtype)).sum(0)
        torch.testing.assert_close(total, torch.ones(T, B, 3), rtol=0.0, atol=1e-6)


def test_the_log_shows_learned_weights():
    for weights in ("softmax", "linear"):
        aggregator = Mlrf(Stack(3, C), weights=weights)
        assert {name: float(value) for name, value in aggregator.record().items()} == pytest.approx(
            {f"layer_{number}": 1 / 3 for number in (1, 2, 3)}
        )
        with torch.no_grad():
            aggregator.fusion.weight[2] += 1
        record = aggregator.record()
        assert record["layer_3"] > 1.5 * record["layer_1"] and not record["layer_3"].requires_grad
    for options in ({"kind": "mean"}, {"kind": "ffn"}, {"kind": "multi-hop"}):
        assert Mlrf(Stack(3, C), **options).record() == Mlrf(Stack(3, C, side="decoder")).record() == {}


def test_an_initialisation_fills_its_matrices():
    shapes = [[tuple(matrix.shape) for matrix in Mlrf(Stack(L, C), kind=kind).matrices()] for kind in KINDS]
    assert shapes == [[], [], [(4 * C, L * C), (C, 4 * C)], [(C, C), (4, C), (C, 4 * C)]]
