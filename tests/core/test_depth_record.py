"""What a training run records about depth: shares of the gradient, and what aggregators hold."""

import itertools
import math

import pytest
import torch

from fairseq_deep.core.diagnostics.record import depth_record
from fairseq_deep.core.diagnostics.weights import dlcl_weights
from tests.helpers.models import make_batch


def backward(model, dictionary):
    """*model* with the gradients of a cross entropy."""
    torch.manual_seed(3)
    source, lengths, target = make_batch(dictionary)
    logits = model(source, lengths, target)[0].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    return model


def test_norms_that_fp16_cannot_hold(build):
    model = build("transformer_postnorm_2l2l_tiny").half()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 30000.0)  # 8 such values already have a norm above 65504
    layer, whole = (sum(p.numel() for p in part.parameters()) for part in (model.encoder.layers[0], model))
    assert depth_record(model)["enc_1"] == pytest.approx(math.sqrt(layer / whole), rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_without_a_finite_gradient_there_are_no_shares(build, dictionary, value):
    model = build("transformer_dlcl_2l2l_tiny")
    assert set(depth_record(model)) == {f"dlcl_{side}_{band}" for side in ("enc", "dec")
                                        for band in ("newest", "previous", "older", "embedding")}  # fmt: skip
    backward(model, dictionary)
    assert "enc_1" in depth_record(model)
    model.encoder.layers[1].fc1.weight.grad[0, 0] = value
    assert all(name.startswith("dlcl_") for name in depth_record(model))
    assert depth_record(build("transformer_postnorm_2l2l_tiny")) == {}


def test_layers_that_layerdrop_left_out_are_recorded(build, dictionary):
    model = build("transformer_prenorm_6l", encoder_layerdrop=0.9).train()
    backward(model, dictionary)
    record = depth_record(model)
    assert [f"enc_{number}" in record for number in range(1, 8)] == [True] * 6 + [False]
    assert min(record[f"enc_{number}"] for number in range(1, 7)) == 0.0  # those that did not run


def test_summary_of_dlcl_weights(build):
    model = build("transformer_dlcl_3l3l_small", decoder_layer_agg="residual")
    weight = torch.tensor([[1.0, 9, 9, 9], [-2, 3, 9, 9], [0.5, -0.25, 4, 9], [1, 1, 2, -8]])
    with torch.no_grad():
        model.encoder.aggregator.weight.copy_(weight)
    assert depth_record(model) == {
        "dlcl_enc_newest": (1 + 3 + 4 + 8) / 4,
        "dlcl_enc_previous": pytest.approx((2 + 0.25 + 2) / 3),
        "dlcl_enc_older": pytest.approx((0.5 + 1 + 1) / 3),
        "dlcl_enc_embedding": (1 + 2 + 0.5 + 1) / 4,
    }


WEIGHTS = [{}, {"dlcl_window": 2}, {"dlcl_normalize": True, "dlcl_window": 3}, {"dlcl_weight_type": "scalar_4"},
           {"dlcl_weight_type": "vector", "dlcl_normalize": True}, {"dlcl_fixed": True}]  # fmt: skip


@pytest.mark.parametrize("flags", WEIGHTS, ids=str)
def test_weights_are_those_that_the_sums_use(build, flags):
    """With one entry 1 and the others 0, a sum is the weight of that entry; also from a checkpoint."""
    model = build("transformer_dlcl_6l", **flags)
    for side in ("encoder", "decoder"):
        getattr(model, side).aggregator.weight.data.normal_()
    stored = dlcl_weights(model.state_dict(), flags.get("dlcl_normalize", False), flags.get("dlcl_window"))
    for side, matrix in dlcl_weights(model).items():
        aggregator = getattr(model, side).aggregator.requires_grad_(False)
        assert torch.equal(stored[side].values, matrix.values) and matrix.per_entry == aggregator.groups
        ones = torch.eye(aggregator.num_layers + 1).unbind()
        for layer, entry in itertools.product(range(len(ones)), repeat=2):
            given = [value.expand(1, 1, aggregator.dim).clone() for value in ones[entry][: layer + 1]]
            state = [*aggregator.start(given[0]), *given[1:]]
            used = aggregator.read(state[:1] + state[1:][-aggregator.window :], layer)
            torch.testing.assert_close(matrix.values[layer, entry], used.mean())


def test_gates_of_the_lstm(build):
    model = build("transformer_lstm_3l3l", lstm_share="none")
    names, size = ("input", "forget", "output"), 3 * 16 * 32  # three layers, width 16
    with torch.no_grad():
        for side, factor in (("encoder", 1.0), ("decoder", 10.0)):
            for gates in getattr(model, side).aggregator.gates:
                for value, matrix in enumerate(gates.weight.chunk(3), 1):
                    matrix.fill_(factor * value)
    record = depth_record(model)
    for side, factor in (("enc", 1.0), ("dec", 10.0)):
        for value, name in enumerate(names, 1):
            assert record[f"lstm_{side}_{name}_gate"] == pytest.approx(factor * value * math.sqrt(size))
    assert not [name for name in depth_record(build("transformer_rnn_6l")) if name.startswith("lstm")]
