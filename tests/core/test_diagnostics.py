"""Gradient norms, variance and gradient ratios, stream widths, source gain, and records, against formulas by hand."""

import itertools
import math

import pytest
import torch

from fairseq_deep.core.diagnostics import layer_gradient_norms, source_gain, stream_statistics, sublayer_ratios
from fairseq_deep.core.diagnostics.parts import tensor_norms
from fairseq_deep.core.diagnostics.record import depth_record
from fairseq_deep.core.diagnostics.weights import dlcl_weights
from fairseq_deep.core.registry import UsageError
from tests.helpers.aggregators import make
from tests.helpers.methods import FORMS_OF_RESIDUALS, PLACED
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import PRENORM as PRE
from tests.helpers.models import TINY, make_batch
from tests.helpers.tensors import shake
from tests.reference.naive_parts import start

PARTS = {"encoder": ["self", "ffn"], "decoder": ["self", "cross", "ffn"]}
DLCL, LSTM = "transformer_dlcl_2l2l_tiny", "transformer_lstm_2l2l_tiny"


def loss_of(model, batch, seed=1):
    scores = model(*batch)[0]
    generator = torch.Generator().manual_seed(seed)
    return (scores * torch.randn(scores.shape, generator=generator)).sum()


def paddings(model, batch):
    pad = model.encoder.padding_idx
    return {"encoder": batch[0].eq(pad), "decoder": batch[2].eq(pad)}


def words_of(model, batch):
    return {side: ~padding.T for side, padding in paddings(model, batch).items()}


def measure(model, batch, loss=None):
    return sublayer_ratios(model, paddings(model, batch), loss or (lambda: loss_of(model, batch)))


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind, ())) for module in model.modules() for kind in kinds)


# --- ratios ---

CONNECTIONS = {f"{norm} {form}": (TINY[norm], FORMS_OF_RESIDUALS[form]) for form, norm in PLACED if " " not in form}
STARTS = (("post", "xavier"), ("pre", "xavier"), ("post", "deepnet"), ("post", "admin"),
          ("post", "tfixup"), ("post", "rezero"))  # fmt: skip
CONNECTIONS |= {f"{norm} {init}": (TINY[norm], {"deep_init": init}) for norm, init in STARTS}
CONNECTIONS |= {"merged": (POST, {"decoder_attn": "merged"}),
                "Luna": (POST, {"encoder_attn": "luna", "decoder_attn": "luna"})}  # fmt: skip


@pytest.mark.parametrize("name, flags", CONNECTIONS.values(), ids=CONNECTIONS)
def test_ratios_of_every_sublayer_equal_the_papers_equations(name, flags, build, dictionary):
    """Eq. (10) to (14) of z, r and o = LN(r); d_z is the gradient at the sub-layer's input through that one only.

    Where there is no norm, there is no beta_LN. Luna's encoder has its packed sequence before the words.
    """
    batch, calls = make_batch(dictionary, target_lengths=(6, 6, 6)), []
    model = shake(build(name, **flags).train(), 0.3)

    def connect(residual, inputs, r):
        r.retain_grad()
        calls.append({"z": inputs[0], "r": r})

    def normalise(norm, inputs, o):
        if calls and inputs[0] is calls[-1]["r"]:
            o.retain_grad()
            calls[-1]["o"] = o

    layers = [*model.encoder.layers, *model.decoder.layers]
    handles = [layer.residual.register_forward_hook(connect) for layer in layers]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    handles += [norm.register_forward_hook(normalise) for norm in norms]
    loss_of(model, batch).backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    measured, words = measure(model, batch), words_of(model, batch)
    parts = PARTS if flags.get("decoder_attn") != "merged" else {**PARTS, "decoder": ["merged", "ffn"]}
    places = [(side, number, part) for side in PARTS for number in (1, 2) for part in parts[side]]
    found = [(side, ratios) for side in PARTS for ratios in measured[side]]
    assert [(side, got.layer, got.part) for side, got in found] == places
    for place, (side, got), call in zip(places, found, calls):
        z, r, d_r = call["z"], call["r"], call["r"].grad.clone()
        centred = r.detach() - r.detach().mean(-1, keepdim=True)
        d_z = torch.autograd.grad(r, z, d_r, retain_graph=True)[0]
        of_words = (centred**2).mean(-1)[-len(words[side]) :][words[side]]
        assert got.variance == pytest.approx(float(of_words.mean()), rel=1e-3), place
        if flags.get("decoder_attn") == "luna":  # whose first sub-layer is also of the packed sequence
            continue
        assert got.beta_rc == pytest.approx(float(d_z.norm() / d_r.norm()), rel=1e-3), place
        if getattr(model, side).layers[got.layer - 1].normalize_before or "o" not in call:
            assert got.beta_ln is None and got.beta == got.beta_rc, place
        else:
            assert got.beta_ln == pytest.approx(float(d_r.norm() / call["o"].grad.norm()), rel=1e-3), place
            assert got.beta == pytest.approx(got.beta_rc * got.beta_ln), place


@pytest.mark.parametrize("name", [POST, PRE])
def test_other_uses_of_an_input_do_not_count_and_no_trace_is_left(name, build, batch):
    """As with aggregators: here the loss sees what goes into the second layer, whose ratio stays."""
    model = build(name, deep_init="xavier").train()
    before, hooked = model(*batch)[0], hooks(model)

    def run(weight):
        encoder_out = model.encoder(*batch[:2], return_all_hiddens=True)
        scores = model.decoder(batch[2], encoder_out=encoder_out)[0]
        return scores.square().sum() + weight * (encoder_out["encoder_states"][1] ** 3).sum()

    alone, again, seen = (measure(model, batch, lambda w=w: run(w))["encoder"] for w in (0.0, 0.0, 10.0))
    assert again == alone, "whatever gradients there are"
    assert (seen[2].layer, seen[2].part) == (2, "self")
    assert seen[2].beta_rc == pytest.approx(alone[2].beta_rc, rel=1e-5)
    assert seen[1].beta_rc != pytest.approx(alone[1].beta_rc, rel=1e-3)
    assert hooks(model) == hooked and torch.equal(model(*batch)[0], before)


def test_a_stack_without_residual_connections_is_left_out(build, batch):
    model = build(LSTM, encoder_layer_agg="residual", encoder_ffn_embed_dim=32).train()
    found = measure(model, batch)
    assert [ratios.part for ratios in found["encoder"]] == ["self", "ffn"] * 2 and found["decoder"] == []


def interrupted(model, batch):
    raise KeyboardInterrupt


REFUSED = [
    (LSTM, {}, UsageError, "no residual connections"),
    (POST, {"no_cross_attention": True}, UsageError, "does not affect the loss"),
    (POST, {"encoder_layerdrop": 1.0}, UsageError, "does not affect the loss"),
    (POST, {"checkpoint_activations": True}, UsageError, "omit --checkpoint-activations"),
    (POST, {"grad": False}, UsageError, "call outside no_grad"),
    (POST, {"loss": interrupted}, KeyboardInterrupt, None),
]


@pytest.mark.parametrize("name, flags, error, words", REFUSED, ids=[str(row[-1]) for row in REFUSED])
def test_what_cannot_be_measured_is_refused_and_no_hook_stays(name, flags, error, words, build, batch):
    loss, grad = flags.get("loss", loss_of), flags.get("grad", True)
    model = build(name, **{key: value for key, value in flags.items() if key not in ("loss", "grad")}).train()
    hooked = hooks(model)
    with pytest.raises(error, match=words), torch.set_grad_enabled(grad):
        measure(model, batch, lambda: loss(model, batch))
    assert hooks(model) == hooked


# --- streams and the source ---


@pytest.mark.parametrize("name", [POST, PRE, DLCL])
def test_std_and_share_between_positions_of_every_stream(name, build, batch):
    """Of what each layer returns, y_0 first, without padding."""
    model = shake(build(name).eval(), 0.4)
    source, lengths, target = batch
    outputs, words = {side: [] for side in PARTS}, words_of(model, batch)
    for side, kept in outputs.items():
        stack = getattr(model, side)
        kept.append(start(stack, source if side == "encoder" else target).detach())
        for layer in stack.layers:
            layer.register_forward_hook(lambda _, inputs, output, kept=kept: kept.append(output[0]))
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    streams = stream_statistics(model, net_input, model.encoder.padding_idx)
    for side, kept in outputs.items():
        values = [state[words[side]].double() for state in kept]
        expected = [math.sqrt(float(((value - value.mean()) ** 2).mean())) for value in values]
        assert len(expected) == 3 and streams["std"][side] == pytest.approx(expected, rel=5e-3)
        shares = []
        for state, std in zip(kept, expected):
            sentences = [state[words[side][:, column], column].double() for column in range(state.size(1))]
            squares = torch.cat([(sentence - sentence.mean(0)) ** 2 for sentence in sentences])
            shares.append(float(squares.mean()) / std**2)
        assert streams["between"][side] == pytest.approx(shares, rel=1e-4)


def test_source_gain_is_what_the_true_source_is_worth(build, batch):
    """Nothing for a model that cannot see it; for others the loss with the sentence before, less that with the own."""
    source, lengths, target = batch
    model = shake(build(PRE).train(), 0.4)
    inputs = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
    sample = {"net_input": inputs, "target": target.roll(-1, 1)}
    pad = model.encoder.padding_idx
    gain = source_gain(model, sample, pad)
    assert model.training
    model.eval()
    losses = []
    for order in ([*range(len(source))], [len(source) - 1, *range(len(source) - 1)]):
        scores = model(source[order], lengths[order], target)[0].double().log_softmax(-1)
        words = sample["target"].ne(pad)
        losses.append(-float(scores[words].gather(1, sample["target"][words].unsqueeze(1)).detach().mean()))
    assert gain == pytest.approx(losses[1] - losses[0], abs=1e-5) and abs(gain) > 1e-3
    for layer in model.decoder.layers:
        torch.nn.init.zeros_(layer.encoder_attn.out_proj.weight)
    assert source_gain(model, sample, pad) == pytest.approx(0, abs=1e-6)
    one = {"net_input": {name: value[:1] for name, value in inputs.items()}, "target": target[:1]}
    with pytest.raises(ValueError, match="at least two sentences"):
        source_gain(model, one, pad)


# --- what a training run records ---


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
def test_gradient_norm_of_every_layer(name, flags, aggregators, build, batch):
    model = shake(build(name, **flags).train(), 0.4)
    loss_of(model, batch).backward()
    norms = layer_gradient_norms(model)
    expected = {"embedding": [by_name(model, "encoder.embed_tokens", "decoder.embed_tokens")]}
    for side in ("encoder", "decoder"):
        modules = [f"{side}.layers.{index}." for index in range(len(getattr(model, side).layers))]
        expected[side] = [by_name(model, *layer) for layer in zip(*[iter(modules)] * (len(modules) // 2))]
    expected |= {f"{side}_aggregator": [by_name(model, f"{side}.aggregator.")] for side in aggregators}
    assert norms.keys() == expected.keys()
    for part, values in expected.items():
        assert norms[part] == pytest.approx(values, rel=1e-4) and min(values) > 0, part


def test_parameters_without_a_gradient_count_nothing(build, batch):
    model = build(POST, encoder_layerdrop=0.9, encoder_layers=12)  # which are all there, also in training
    assert layer_gradient_norms(model.train()) == {"encoder": [0.0] * 12, "decoder": [0.0, 0.0], "embedding": [0.0]}
    for parameter in model.encoder.layers[0].parameters():
        parameter.requires_grad = False
    loss_of(model.eval(), batch).backward()
    norms = layer_gradient_norms(model)
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
def test_without_a_finite_gradient_there_are_no_shares(build, batch, value):
    model = build(DLCL)
    assert set(depth_record(model)) == {f"dlcl_{side}_{band}" for side in ("enc", "dec")
                                        for band in ("newest", "previous", "older", "embedding")}  # fmt: skip
    loss_of(model, batch).backward()
    assert "enc_1" in depth_record(model)
    model.encoder.layers[1].fc1.weight.grad[0, 0] = value
    assert all(name.startswith("dlcl_") for name in depth_record(model))
    assert depth_record(build(POST)) == {}


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
