"""Residual connections against their equations written out, alone and in layers."""

import pytest
import torch

from fairseq_deep.core.inits.admin import WeightedConnection
from fairseq_deep.core.inits.deepnet import ScaledConnection
from fairseq_deep.core.inits.rezero import GatedConnection
from fairseq_deep.core.layers import DecoderLayer, EncoderLayer
from fairseq_deep.core.residuals.plain import Plain
from tests.helpers.layers import B, C, T, call, describe_layer, inputs
from tests.helpers.tensors import DOUBLE

VALUE = 0.7
KINDS = {
    "plain": (Plain, {}),
    "constant": (ScaledConnection, {"alpha": VALUE}),
    "vector": (WeightedConnection, {"start": VALUE}),
    "gate": (GatedConnection, {}),
}
SUBLAYERS = {"encoder": 2, "decoder": 3, "decoder without source": 2}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_layer = pytest.mark.parametrize("layer_kind", SUBLAYERS)


def shapes(kind, sublayers):
    """The shape of the weight of all connections of a layer, if they have any."""
    return {"vector": [(sublayers, C)], "gate": [(1,)]}.get(kind, [])


def connect(kind, stack):
    """The connections of a layer of *stack*."""
    method, options = KINDS[kind]
    return method(stack, 1, **options)


STACKS = {2: describe_layer("encoder"), 3: describe_layer("decoder")}


def make(kind, sublayers):
    """Connections with random weights."""
    residual = connect(kind, STACKS[sublayers]).double()
    for weight in residual.parameters():
        torch.nn.init.normal_(weight)
    return residual


@every_kind
@pytest.mark.parametrize("sublayers", STACKS)
def test_they_start_with_the_given_value(kind, sublayers):
    residual = connect(kind, STACKS[sublayers])
    assert [tuple(weight.shape) for weight in residual.parameters()] == shapes(kind, sublayers)
    for weight in residual.parameters():
        assert weight.requires_grad and weight.eq(0.0 if kind == "gate" else torch.tensor(VALUE)).all()


def equations(kind, residual, index, x, output, slope):
    """r, dr/dx, dr/dF and dr/dweight (None without one), each in the direction *slope*, one number after the other."""
    kept, added = torch.ones(C, **DOUBLE), torch.ones(C, **DOUBLE)
    if kind == "constant":
        kept *= VALUE
    elif kind == "vector":
        kept = residual.weight[index].detach()
    elif kind == "gate":
        added *= residual.weight.item()
    of_weight = torch.zeros_like(residual.weight) if hasattr(residual, "weight") else None
    r, of_x, of_output = (torch.zeros(T, B, C, **DOUBLE) for _ in range(3))
    for t in range(T):
        for b in range(B):
            for c in range(C):
                at = (t, b, c)
                r[at] = kept[c] * x[at] + added[c] * output[at]
                of_x[at] = slope[at] * kept[c]
                of_output[at] = slope[at] * added[c]
                if kind == "vector":
                    of_weight[index, c] += slope[at] * x[at]
                elif kind == "gate":
                    of_weight[0] += slope[at] * output[at]
    return r, of_x, of_output, of_weight


@every_kind
@pytest.mark.parametrize("sublayers, index", [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_outputs_and_gradients_equal_the_equations(kind, sublayers, index):
    residual = make(kind, sublayers)
    x, output = (torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(2))
    slope = torch.randn(T, B, C, **DOUBLE)
    r = residual(x, output, index, x)
    r.backward(slope)
    with torch.no_grad():
        expected, of_x, of_output, of_weight = equations(kind, residual, index, x, output, slope)
    torch.testing.assert_close(r.detach(), expected)
    torch.testing.assert_close(x.grad, of_x)
    torch.testing.assert_close(output.grad, of_output)
    if of_weight is not None:
        torch.testing.assert_close(residual.weight.grad, of_weight)


def make_layer(layer_kind, kind, **flags):
    side, _, without_source = layer_kind.partition(" ")
    stack = describe_layer(side, no_cross_attention=bool(without_source), **flags)
    return (EncoderLayer if side == "encoder" else DecoderLayer)(stack, connect(kind, stack)).double()


def run(layer_kind, layer):
    x, options = inputs("encoder" if layer_kind == "encoder" else "decoder")
    output = call(layer, x, **options)
    return x, output if layer_kind == "encoder" else output[0]


@every_kind
@every_layer
def test_each_sublayer_of_a_layer_has_one(kind, layer_kind):
    """With sub-layers that give nothing, a pre-norm layer is the product of what its connections keep."""
    sublayers = SUBLAYERS[layer_kind]
    layer = make_layer(layer_kind, kind, pre_norm=True)
    assert [tuple(weight.shape) for weight in layer.residual.parameters()] == shapes(kind, sublayers)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.zero_() if "out_proj" in name or name.startswith("fc2") else parameter.normal_()
    x, output = run(layer_kind, layer)
    kept = {"constant": VALUE**sublayers, "vector": None, "gate": 1.0, "plain": 1.0}[kind]
    kept = layer.residual.weight.detach().prod(0) if kept is None else kept
    torch.testing.assert_close(output, x * kept)


@every_layer
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
def test_layers_without_norms_have_no_parameters_of_norms(layer_kind, pre_norm):
    """Both placements are then the same layer."""
    without = make_layer(layer_kind, "gate", deep_init="rezero", pre_norm=False)
    without.normalize_before = pre_norm
    plain = make_layer(layer_kind, "plain", pre_norm=pre_norm)
    left_out = {name for name, _ in plain.named_parameters()} - {name for name, _ in without.named_parameters()}
    assert left_out == {name for name, _ in plain.named_parameters() if "norm" in name}
    assert len(left_out) == 2 * SUBLAYERS[layer_kind]
    x, output = run(layer_kind, without)
    assert torch.equal(output, x), "a gate of 0 lets nothing in"
    torch.nn.init.constant_(without.residual.weight, 1.0)
    x, output = run(layer_kind, without)
    assert not torch.allclose(output, x)
    without.normalize_before = not pre_norm
    torch.manual_seed(7)
    x, output = run(layer_kind, without)
    without.normalize_before = pre_norm
    torch.manual_seed(7)
    assert torch.equal(run(layer_kind, without)[1], output)
