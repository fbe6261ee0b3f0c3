"""Residual connections of the initialisations (plain, DeepNet, Admin, ReZero) alone and in layers.

Whole models are proven in ``test_inits_models.py``.
"""

import pytest
import torch

from fairseq_deep.core.inits.admin import WeightedConnection
from fairseq_deep.core.inits.deepnet import ScaledConnection
from fairseq_deep.core.inits.rezero import GatedConnection
from fairseq_deep.core.layers import DecoderLayer, EncoderLayer
from fairseq_deep.core.residuals.plain import Plain
from tests.helpers.layers import B, C, T, call, describe_layer, inputs
from tests.helpers.tensors import DOUBLE, assert_same_gradients, shake
from tests.reference.naive_connections import connect

VALUE = 0.7
KINDS = {  # method in the plain form, class and options
    "plain": (Plain, {}),
    "deepnet": (ScaledConnection, {"alpha": VALUE}),
    "admin": (WeightedConnection, {"start": VALUE}),
    "rezero": (GatedConnection, {}),
}
SUBLAYERS = {"encoder": 2, "decoder": 3, "decoder without source": 2}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_layer = pytest.mark.parametrize("layer_kind", SUBLAYERS)


def make(kind, stack):
    method, options = KINDS[kind]
    return method(stack, 1, **options)


@every_kind
@pytest.mark.parametrize("side, sublayers", [("encoder", 2), ("decoder", 3)])
def test_values_start_and_gradients_equal_the_equations(kind, side, sublayers):
    residual = make(kind, describe_layer(side)).double()
    shapes = {"admin": [(sublayers, C)], "rezero": [(1,)]}.get(kind, [])
    assert [tuple(weight.shape) for weight in residual.parameters()] == shapes
    for weight in residual.parameters():
        assert weight.requires_grad and weight.eq(0.0 if kind == "rezero" else torch.tensor(VALUE)).all()
    shake(residual, 1.0)
    for index in range(sublayers):
        weight = getattr(residual, "weight", None)
        factor = weight[index] if kind == "admin" else {"plain": None, "deepnet": VALUE, "rezero": weight}[kind]
        x, output = (torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(2))
        expected = connect(kind, factor)(x, output)
        actual = residual(x, output, index, x)
        torch.testing.assert_close(actual, expected)
        assert_same_gradients(actual, expected, [x, output, *residual.parameters()])


def make_layer(layer_kind, kind, **flags):
    side, _, without_source = layer_kind.partition(" ")
    stack = describe_layer(side, no_cross_attention=bool(without_source), **flags)
    return (EncoderLayer if side == "encoder" else DecoderLayer)(stack, make(kind, stack)).double()


def run(layer_kind, layer):
    x, options = inputs("encoder" if layer_kind == "encoder" else "decoder")
    output = call(layer, x, **options)
    return x, output if layer_kind == "encoder" else output[0]


@every_kind
@every_layer
def test_each_sublayer_of_a_layer_has_one(kind, layer_kind):
    """With sub-layers that give nothing, a pre-norm layer is the product of what its connections keep."""
    layer = make_layer(layer_kind, kind, pre_norm=True)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.zero_() if "out_proj" in name or name.startswith("fc2") else parameter.normal_()
    x, output = run(layer_kind, layer)
    kept = {"deepnet": VALUE ** SUBLAYERS[layer_kind], "admin": None}.get(kind, 1.0)
    torch.testing.assert_close(output, x * (layer.residual.weight.detach().prod(0) if kept is None else kept))


@every_layer
def test_layers_without_norms_have_no_parameters_of_norms(layer_kind):
    """Both placements are then the same layer."""
    without, plain = (make_layer(layer_kind, kind, **flags) for kind, flags in
                      (("rezero", {"deep_init": "rezero"}), ("plain", {})))  # fmt: skip
    left_out = {name for name, _ in plain.named_parameters()} - {name for name, _ in without.named_parameters()}
    assert left_out == {name for name, _ in plain.named_parameters() if "norm" in name}
    assert len(left_out) == 2 * SUBLAYERS[layer_kind]
    for gate in (0.0, 1.0):
        torch.nn.init.constant_(without.residual.weight, gate)
        outputs = []
        for without.normalize_before in (False, True):
            torch.manual_seed(7)
            x, output = run(layer_kind, without)
            outputs.append(output)
        assert torch.equal(*outputs)
        assert torch.equal(output, x) == (gate == 0.0), "a gate of 0 lets nothing in"
