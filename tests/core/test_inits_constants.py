"""The constants of the initialisations that are published, to four decimals."""

import math

import pytest
import torch

from fairseq_deep.core.inits import INITS
from fairseq_deep.core.inits import MatrixLocation as Place
from fairseq_deep.core.inits.admin import Admin, omega
from fairseq_deep.core.inits.deepnet import DeepNet
from fairseq_deep.core.inits.ds import DepthScaled
from fairseq_deep.core.inits.tfixup import TFixup
from fairseq_deep.core.stack import Stack


def stack(side, n, m):
    """One of the stacks of a model with n encoder and m decoder layers."""
    layers, other = (n, m) if side == "encoder" else (m, n)
    return Stack(layers, 16, pre_norm=False, side=side, other_layers=other)


@pytest.mark.parametrize(
    "n, m, encoder, decoder",
    [
        (6, 6, (1.4179, 0.4970), (2.0598, 0.3433)),
        (12, 12, (1.7609, 0.4002), (2.4495, 0.2887)),
        (18, 18, (1.9987, 0.3526), (2.7108, 0.2608)),
        (30, 6, (2.1203, 0.3324), (2.0598, 0.3433)),
        (100, 100, (3.4157, 0.2063), (4.1618, 0.1699)),
    ],
)
def test_deepnet_constants(n, m, encoder, decoder):
    for side, (alpha, beta) in (("encoder", encoder), ("decoder", decoder)):
        init = DeepNet(stack(side, n, m))
        assert (init.alpha, init.beta) == (pytest.approx(alpha, abs=5e-5), pytest.approx(beta, abs=5e-5))
        assert init.connection(1).alpha == init.alpha


@pytest.mark.parametrize(
    "connections, value",
    [(12, 2.0170), (18, 2.3351), (24, 2.6013), (36, 3.0408), (48, 3.4045), (60, 3.7200), (72, 4.0018), (90, 4.3788)],
)
def test_admin_closed_form(connections, value):
    assert omega("logn", connections) == pytest.approx(value, abs=5e-5)
    assert omega("1", connections) == pytest.approx(math.sqrt(connections))
    assert omega("n", connections) == omega("profile", connections) == 1.0
    assert Admin(stack("encoder", connections // 2, 7)).omega == pytest.approx(value, abs=5e-5)
    if connections % 3 == 0:
        assert Admin(stack("decoder", 7, connections // 3)).omega == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize(
    "n, m, factors",
    [(6, 6, (0.4281, 0.3689, 0.3689)), (12, 12, (0.3600, 0.3102, 0.3102)), (30, 6, (0.2863, 0.3689, 0.2467))],
)
def test_tfixup_factors(n, m, factors):
    """Of the encoder's matrices, the decoder's, and the embedding."""
    encoder, decoder = TFixup(stack("encoder", n, m)), TFixup(stack("decoder", n, m))
    for place in (Place(n, "self_attn", "v_proj"), Place(1, "self_attn", "out_proj"), Place(2, "ffn", "fc1")):
        assert encoder.gain(place) == pytest.approx(factors[0], abs=5e-5)
    for place in (Place(m, "self_attn", "v_proj"), Place(1, "encoder_attn", "v_proj"), Place(2, "ffn", "fc2")):
        assert decoder.gain(place) == pytest.approx(factors[1], abs=5e-5)
    torch.manual_seed(1)
    start = torch.randn(50, 16) / 4
    for init, factor in ((encoder, factors[2]), (decoder, factors[1])):
        torch.manual_seed(1)
        table = torch.empty(50, 16)
        init.embedding(table)
        torch.testing.assert_close(table, start * factor, rtol=3e-4, atol=0)


@pytest.mark.parametrize(
    "exponent, multipliers",
    [
        (0.25, {1: 1.0, 2: 0.8409, 6: 0.6389, 12: 0.5373, 20: 0.4729, 30: 0.4273}),
        (0.5, {1: 1.0, 2: 0.7071, 6: 0.4082, 12: 0.2887, 20: 0.2236, 30: 0.1826}),
    ],
)
def test_ds_init_multipliers(exponent, multipliers):
    for side in ("encoder", "decoder"):
        init = DepthScaled(stack(side, 30, 30), exponent=exponent)
        for layer, value in multipliers.items():
            for place in (Place(layer, "ffn", "fc1"), Place(layer, "encoder_attn", "q_proj")):
                assert init.gain(place) == pytest.approx(value, abs=5e-5)
            assert init.gain(Place(layer, "self_attn", "k_proj")) == pytest.approx(value * math.sqrt(0.5), abs=5e-5)


def test_ds_init_defaults_are_those_of_the_published_measurements():
    init = DepthScaled(stack("encoder", 6, 6))
    assert (init.alpha, init.exponent) == (1.0, 0.25)


@pytest.mark.parametrize(
    "role, part, bound",
    [
        ("q_proj", "self_attn", 0.0541),
        ("q_proj", "encoder_attn", 0.0765),
        ("out_proj", "self_attn", 0.0765),
        ("fc1", "ffn", 0.0484),
        ("fc2", "ffn", 0.0484),
    ],
)
def test_bounds_at_base_width(role, part, bound):
    fan_out, fan_in = {"fc1": (2048, 512), "fc2": (512, 2048)}.get(role, (512, 512))
    weight = torch.empty(fan_out, fan_in)
    INITS.get("xavier")(stack("encoder", 6, 6)).matrix(weight, Place(1, part, role))
    assert float(weight.abs().max()) == pytest.approx(bound, abs=6e-5)
    lipschitz = {512: 0.0442, 2048: 0.0221}[fan_in]
    INITS.get("lipschitz")(stack("encoder", 6, 6)).matrix(weight, Place(1, part, role))
    assert float(weight.abs().max()) == pytest.approx(lipschitz, abs=6e-5)
