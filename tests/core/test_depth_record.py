"""What a training run records about depth: gradient norms of layers, their shares, and what aggregators hold."""

import itertools
import math

import pytest
import torch

from fairseq_deep.core.diagnostics import layer_gradient_norms
from fairseq_deep.core.diagnostics.parts import tensor_norms
from fairseq_deep.core.diagnostics.record import depth_record
from fairseq_deep.core.diagnostics.weights import dlcl_weights
from tests.helpers.aggregators import make
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import make_batch
from tests.helpers.tensors import shake

DLCL, LSTM = "transformer_dlcl_2l2l_tiny", "transformer_lstm_2l2l_tiny"


def backward(model, dictionary):
    """*model* with the gradients of a cross entropy."""
    torch.manual_seed(3)
    source, lengths, target = make_batch(dictionary)
    logits = model(source, lengths, target)[0].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    return model


def by_name(model, *prefixes):
    """The norm over all parameters whose names begin so."""
    gradients = [value.grad for name, value in model.named_parameters() if name.startswith(prefixes)]
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))


@pytest.mark.parametrize(
    "name, flags, aggregators",
    [
        (POST, {"deep_init": "admin"}, []),
        (DLCL, {}, ["encoder", "decoder"]),
        (POST, {"decoder_layer_agg": "dlcl"}, ["decoder"]),
        (LSTM, {"lstm_merge": "two"}, ["encoder", "decoder"]),
    ],
)
def test_gradient_norm_of_every_layer(name, flags, aggregators, build, dictionary):
    model = shake(build(name, **flags).train(), 0.4)
    norms = layer_gradient_norms(backward(model, dictionary))
    expected = {"embedding": [by_name(model, "encoder.embed_tokens", "decoder.embed_tokens")]}
    for side in ("encoder", "decoder"):
        modules = [f"{side}.layers.{index}." for index in range(len(getattr(model, side).layers))]
        expected[side] = [by_name(model, *layer) for layer in zip(*[iter(modules)] * (len(modules) // 2))]
    expected |= {f"{side}_aggregator": [by_name(model, f"{side}.aggregator.")] for side in aggregators}
    assert norms.keys() == expected.keys()
    for part, values in expected.items():
        assert norms[part] == pytest.approx(values, rel=1e-4) and min(values) > 0, part


def test_parameters_without_a_gradient_count_nothing(build, dictionary):
    model = build(POST, encoder_layerdrop=0.9, encoder_layers=12)  # which are all there, also in training
    assert layer_gradient_norms(model.train()) == {"encoder": [0.0] * 12, "decoder": [0.0, 0.0], "embedding": [0.0]}
    for parameter in model.encoder.layers[0].parameters():
        parameter.requires_grad = False
    norms = layer_gradient_norms(backward(model.eval(), dictionary))
    assert norms["encoder"][0] == 0.0 < norms["encoder"][1]


def test_gradients_of_two_precisions_have_norms_in_fp32_or_better(build):
    """As under --fp16, where the weights of DLCL stay in fp32."""
    model = build(DLCL)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name.endswith("aggregator.weight") else torch.bfloat16)
        parameter.grad = torch.ones_like(parameter)
    size = sum(parameter.numel() for parameter in model.encoder.aggregator.parameters())
    assert layer_gradient_norms(model)["encoder_aggregator"] == pytest.approx([math.sqrt(size)], rel=1e-2)
    for dtype, expected in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        [norm] = tensor_norms([torch.full((4,), 60000.0, dtype=dtype)])  # beyond the largest number of fp16
        assert norm.dtype == expected and norm.item() == pytest.approx(120000, rel=1e-3)


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


EMA, BANDS = 0.3, {"newest": 1.0, "previous": 0.0, "older": 0.0, "embedding": 0.25}
SHOWN = [  # a method with three layers, the values of its parameters, and what is recorded of them
    ("attention-residual", {}, {"query": [[2.0] * 7] * 6}, {"query": 2 * (6 * 7) ** 0.5}),
    ("dlcl", {}, {"weight": [[1.0, 9, 9, 9], [-2, 3, 9, 9], [0.5, -0.25, 4, 9], [1, 1, 2, -8]]},
     {"newest": (1 + 3 + 4 + 8) / 4, "previous": (2 + 0.25 + 2) / 3, "older": (0.5 + 1 + 1) / 3,
      "embedding": (1 + 2 + 0.5 + 1) / 4}),
    ("lstm", {"share": "none"}, {f"gates.{layer}.weight": [[value] * 14 for value in (1.0, 2.0, 3.0) for _ in range(7)]
                                 for layer in range(3)},
     {f"{gate}_gate": value * (3 * 7 * 14) ** 0.5 for gate, value in (("input", 1), ("forget", 2), ("output", 3))}),
    ("rnn", {}, {}, {}),
    ("gtrans", {"group_layers": 1}, {"fusion.weight": [1.0, 2.0, 3.0]}, {"group_1": 1, "group_2": 2, "group_3": 3}),
    ("hyper-connections", {"kind": "static", "streams": 2},
     {"mixers.0.reads": [[1.0, 1.0], [1.0, -2.0], [0.0, 0.5]], "mixers.2.reads": [[1.0, 1.0], [1.0, 0.0], [3.0, 1.0]]},
     {"gain": 8.5}),
    ("hyper-connections", {"kind": "manifold"}, {}, {}),
    ("mlrf", {}, {"fusion.weight": [0.0, 0.0, math.log(2)]}, {"layer_1": 0.25, "layer_2": 0.25, "layer_3": 0.5}),
    ("mlrf", {"weights": "linear"}, {"fusion.weight": [1.0, 2.0, 3.0]}, {"layer_1": 1, "layer_2": 2, "layer_3": 3}),
    *(("mlrf", {"kind": kind}, {}, {}) for kind in ("mean", "ffn", "multi-hop")),
    ("mudd", {}, {}, BANDS),
    ("mudd", {}, {"out.1.bias": [0.6, -0.5, 0.4]},
     {"newest": 0.85, "previous": 0.5 / 3, "older": 0.2, "embedding": 0.4}),
    ("ode", {}, {}, {}), ("ode", {"method": "ema"}, {"alpha": [EMA]}, {"alpha": EMA}),
    ("ode", {"method": "rk2-init"}, {"scalars": [2.0, 3.0]}, {"first": 2, "second": 3}),
    ("ode", {"method": "rk2-init", "history": "dlcl"}, {"inner.weight": torch.eye(4).tolist()},
     {"first": 1, "second": 1, **BANDS}),
]  # fmt: skip


@pytest.mark.parametrize("name, options, values, expected", SHOWN, ids=lambda part: str(part)[:30])
def test_what_methods_show(name, options, values, expected):
    aggregator = make(name, 3, 7, **options)
    for key, value in values.items():
        aggregator.get_parameter(key).data.copy_(torch.tensor(value))
    record = aggregator.record()
    assert {key: value.item() for key, value in record.items()} == pytest.approx(expected)
