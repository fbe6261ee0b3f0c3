"""Multi-layer representation fusion: the equations, the limits they give, whole models."""

import pytest
import torch

from fairseq_deep.core.aggregators.mlrf import Mlrf
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import make_layers, run
from tests.helpers.models import TINY, make_batch
from tests.helpers.tensors import DOUBLE, assert_same_gradients, randomise
from tests.reference import naive_mlrf

T, B, C, L = 3, 2, 12, 5
OPTIONS = [
    {"kind": "mean"},
    {"kind": "learned"},
    {"kind": "learned", "weights": "linear"},
    {"kind": "ffn"},
    {"kind": "ffn", "hidden": 5},
    {"kind": "multi-hop"},
    {"kind": "multi-hop", "hidden": 7, "hops": 1},
    {"kind": "multi-hop", "hops": 3},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
every_kind = pytest.mark.parametrize("kind", ["mean", "learned", "ffn", "multi-hop"])
both_norms = pytest.mark.parametrize("norm", ["pre", "post"])


def flags_of(options):
    return {"layer_agg": "mlrf", **{f"mlrf_{name}": value for name, value in options.items()}}


def function_of(aggregator, kind, weights="softmax", **_):
    """The naive function with the parameters of *aggregator*."""
    fusion = aggregator.fusion
    if kind == "mean":
        return naive_mlrf.mean
    if kind == "learned":
        return lambda y: naive_mlrf.learned(y, fusion.weight, weights == "softmax")
    if kind == "ffn":
        fc1, fc2 = fusion.fc1, fusion.fc2
        return lambda y: naive_mlrf.ffn(y, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    return lambda y: naive_mlrf.multi_hop(y, fusion.hidden.weight.T, fusion.hops.weight.T, fusion.out.weight)


def naive(aggregator, outputs, **options):
    norms = [(norm.weight, norm.bias) for norm in aggregator.layer_norms]
    final = aggregator.final_norm
    final_norm = None if final is None else (final.weight, final.bias)
    return naive_mlrf.fuse(outputs, function_of(aggregator, **options), norms, final_norm)


@both_norms
@every_option
def test_forward_and_gradients_equal_the_equation(norm, options):
    aggregator = Mlrf(Stack(L, C, norm == "pre"), **options).double()
    with torch.no_grad():
        for parameter in aggregator.parameters():
            parameter.copy_(torch.randn_like(parameter))
    layers = make_layers(L, C)
    y_0 = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    outputs = [layers[0](y_0)]
    for layer in layers[1:]:
        outputs.append(layer(outputs[-1]))
    expected, actual = naive(aggregator, outputs, **options), run(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected)
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    assert all(grad.any() for grad in assert_same_gradients(actual, expected, sources))


@both_norms
def test_learned_weights_start_as_the_mean(norm):
    state = list(torch.randn(L, T, B, C).unbind())
    mean = Mlrf(Stack(L, C, norm == "pre"), kind="mean").finish(state)
    for weights in ("softmax", "linear"):
        learned = Mlrf(Stack(L, C, norm == "pre"), weights=weights)
        torch.testing.assert_close(learned.finish(state), mean)


def test_weight_on_the_last_layer_alone_is_its_norm():
    state = list(torch.randn(L, T, B, C).unbind())
    for pre_norm in (True, False):
        aggregator = Mlrf(Stack(L, C, pre_norm), weights="linear")
        with torch.no_grad():
            aggregator.fusion.weight.copy_(torch.eye(L)[-1])
        torch.testing.assert_close(aggregator.finish(state), torch.nn.functional.layer_norm(state[-1], (C,)))


def test_hops_share_all_layers_out():
    """U sums to 1 over layers; equal layers are their own mean, for each hop."""
    fusion = randomise(Mlrf(Stack(L, C), kind="multi-hop", hops=3)).fusion
    layers = torch.randn(L, T, B, C)
    assert fusion.shares(layers).shape == (L, T, B, 3)
    torch.testing.assert_close(fusion.shares(layers).sum(0), torch.ones(T, B, 3))
    for dtype in (torch.bfloat16, torch.float16):
        total = fusion.to(dtype).shares(layers.to(dtype)).sum(0)
        torch.testing.assert_close(total, torch.ones(T, B, 3), rtol=0.0, atol=1e-6)
    fusion.float()
    expected = fusion.out(layers[0].repeat(1, 1, 3))
    torch.testing.assert_close(fusion([layers[0]] * L), expected, rtol=1e-4, atol=1e-4)


@every_kind
def test_the_decoder_is_the_plain_stack(kind):
    aggregator = Mlrf(Stack(L, C, side="decoder"), kind=kind)
    assert not list(aggregator.parameters()) and not list(aggregator.buffers()) and not aggregator.matrices()
    layers = make_layers(L, C, torch.float32)
    x = torch.randn(T, B, C)
    expected = x
    state = aggregator.start(x)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
        expected = layer(expected)
        assert len(state) == 1
    assert torch.equal(aggregator.finish(state), expected)


@every_kind
@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kind, norm, dtype):
    exact = Mlrf(Stack(L, 64, norm == "pre"), kind=kind)
    state = [(5 * torch.randn(63, 1, 64)).to(dtype) for _ in range(L)]
    expected = exact.finish([y.float() for y in state])
    exact.to(dtype)
    for y in state:
        y.requires_grad_()
    output = exact.finish(state)
    assert output.dtype == dtype and output.shape == (63, 1, 64)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.06)
    output.float().sum().backward()
    for source in (*state, *exact.parameters()):
        assert source.grad.isfinite().all()
    if kind in ("mean", "learned"):
        assert exact.fusion.weight.dtype == torch.float32, "it stays exact"


@every_kind
@both_norms
def test_autocast_and_mixed_dtypes(kind, norm):
    for dtype in (torch.float32, torch.bfloat16):
        aggregator = Mlrf(Stack(L, 16, norm == "pre"), kind=kind)
        state = [torch.randn(5, 2, 16) for _ in range(L)]
        plain = aggregator.finish(state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = aggregator.finish([y.to(dtype) for y in state])
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), plain, rtol=0.05, atol=0.1)
        output.float().square().sum().backward()


def test_dropout_acts_on_the_inner_layer():
    aggregator = Mlrf(Stack(L, C, dropout=0.3, activation_dropout=0.2), kind="ffn")
    inner = []
    aggregator.fusion.fc2.register_forward_pre_hook(lambda _, args: inner.append(args[0]))
    state = list(torch.randn(L, 40, 30, C).unbind())
    aggregator.finish(state)
    aggregator.eval().finish(state)
    alive = inner[1] != 0  # a ReLU makes zeros too
    kept = inner[0] != 0
    assert (kept & alive).sum() / alive.sum() == pytest.approx(0.8, abs=0.02)
    torch.testing.assert_close(inner[0][kept], inner[1][kept] / 0.8)


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
    for kind in ("mean", "ffn", "multi-hop"):
        assert Mlrf(Stack(3, C), kind=kind).record() == {}
    assert Mlrf(Stack(3, C, side="decoder")).record() == {}


@both_norms
@every_option
def test_parameter_count_of_the_encoder(norm, options):
    for layers, dim in ((6, 512), (2, 32)):
        with torch.device("meta"):
            aggregator = Mlrf(Stack(layers, dim, norm == "pre"), **options)
        hidden, hops = options.get("hidden"), options.get("hops", 4)
        own = {
            "mean": 0,
            "learned": layers,
            "ffn": (layers + 1) * dim * (hidden or 4 * dim) + (hidden or 4 * dim) + dim,
            "multi-hop": (hidden or dim) * (dim + hops) + hops * dim**2,
        }[options["kind"]]
        norms = 2 * dim * (layers if norm == "pre" else 1)
        assert sum(parameter.numel() for parameter in aggregator.parameters()) == own + norms


def test_an_initialisation_fills_its_matrices():
    shapes = {
        kind: [tuple(matrix.shape) for matrix in Mlrf(Stack(L, C), kind=kind).matrices()]
        for kind in ("mean", "learned", "ffn", "multi-hop")
    }
    assert shapes == {
        "mean": [],
        "learned": [],
        "ffn": [(4 * C, L * C), (C, 4 * C)],
        "multi-hop": [(C, C), (4, C), (C, 4 * C)],
    }


@both_norms
@every_option
def test_a_model_learns_in_every_parameter(norm, options, build, batch):
    model = build(TINY[norm], **flags_of(options)).train()
    model(*batch)[0].log_softmax(-1)[..., 7].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    if options["kind"] != "mean":
        assert all(parameter.grad.any() for parameter in model.encoder.aggregator.fusion.parameters())


@both_norms
@every_kind
def test_only_the_encoder_differs_from_the_plain_model(norm, kind, build, batch):
    model, plain = build(TINY[norm], layer_agg="mlrf", mlrf_kind=kind), build(TINY[norm])
    names = set(dict(model.named_parameters())) - set(dict(plain.named_parameters()))
    assert names and all(name.startswith("encoder.history.") for name in names)
    missing, unexpected = torch.nn.Module.load_state_dict(model, plain.state_dict(), strict=False)
    assert not unexpected
    with torch.no_grad():
        encoder_out = plain.eval().encoder(*batch[:2])
        scores = [part.eval().decoder(batch[2], encoder_out=encoder_out)[0] for part in (model, plain)]
        assert torch.equal(*scores)
        assert not torch.allclose(model.encoder(*batch[:2])["encoder_out"][0], encoder_out["encoder_out"][0], atol=0.01)


@both_norms
@every_kind
def test_incremental_decoding_equals_full_decoding(norm, kind, build, dictionary):
    model = build(TINY[norm], layer_agg="mlrf", mlrf_kind=kind).eval().double()
    source, lengths, target = make_batch(dictionary, target_lengths=(6, 6, 6))
    state = {}
    with torch.no_grad():
        encoder_out = model.encoder(source, lengths)
        full = model.decoder(target, encoder_out=encoder_out)[0]
        for step in range(1, 7):
            last = model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)[0]
            torch.testing.assert_close(last[:, -1], full[:, step - 1], rtol=1e-6, atol=1e-6)


@both_norms
@every_kind
def test_padding_changes_nothing(norm, kind, build, dictionary):
    model = build(TINY[norm], layer_agg="mlrf", mlrf_kind=kind).eval().double()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    padding = torch.full((2, 3), dictionary.pad())
    with torch.no_grad():
        alone = model(source, lengths, target)[0]
        for padded in (torch.cat([padding, source], dim=1), torch.cat([source, padding], dim=1)):
            torch.testing.assert_close(model(padded, lengths, target)[0], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kind": "hop"}, "--mlrf-kind hop is unknown: use one of mean, learned, ffn, multi-hop"),
        ({"weights": "soft"}, "--mlrf-weights soft is unknown"),
        ({"kind": "mean", "weights": "linear"}, "--mlrf-weights has no effect with --mlrf-kind mean"),
        ({"kind": "learned", "hidden": 8}, "--mlrf-hidden has no effect with --mlrf-kind learned"),
        ({"kind": "ffn", "hops": 2}, "--mlrf-hops has no effect with --mlrf-kind ffn: omit it, or use multi-hop"),
        ({"kind": "ffn", "hidden": 0}, "--mlrf-hidden 0"),
        ({"kind": "multi-hop", "hops": 0}, "--mlrf-hops 0"),
    ],
)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_wrong_options_are_refused_in_one_line(side, options, words):
    with pytest.raises(UsageError) as error:
        Mlrf(Stack(L, C, side=side), **options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"layer_agg": "mlrf", "encoder_layers": 0}, "--encoder-layers 1 or more"),
        ({"layer_agg": "mlrf", "encoder_layerdrop": 0.1}, "omit --encoder-layerdrop"),
        ({"decoder_layer_agg": "mlrf"}, "is not supported: use --encoder-layer-agg mlrf"),
        ({"layer_agg": "mlrf", "decoder_layer_agg": "mlrf"}, "--layer-agg mlrf requires an encoder"),
        ({"layer_agg": "mlrf", "encoder_layer_agg": "dlcl"}, "requires an encoder, and --decoder-layer-agg"),
        ({"mlrf_kind": "mean"}, "--mlrf-kind has no effect"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY["pre"], **flags)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_other_decoders_beside_it(build, batch):
    """Also a memory that reads single layers: for it g is the output of the last one."""
    for flags in (
        {"encoder_layer_agg": "mlrf", "mlrf_kind": "ffn"},
        {"encoder_layer_agg": "mlrf", "decoder_layer_agg": "dlcl"},
        {"layer_agg": "mlrf", "mlrf_kind": "ffn", "decoder_memory": "transparent"},
        {"layer_agg": "mlrf", "mlrf_kind": "multi-hop", "decoder_attn": "average", "deep_init": "lipschitz"},
    ):
        model = build(TINY["post"], **flags)
        model(*batch)[0].square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_one_layer_of_the_encoder_is_enough(build, batch):
    """Its mean with nothing else is the plain encoder."""
    flags = {"encoder_layers": 1, "mlrf_kind": "mean"}
    model, plain = build(TINY["post"], layer_agg="mlrf", **flags).eval(), build(TINY["post"], encoder_layers=1).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(*batch)[0], plain(*batch)[0])
