"""Aggregation of layers by routing: the equations, the limits they give, numbers without variance, whole models."""

import itertools
import math

import pytest
import torch

from fairseq_deep.core.aggregators.routing import DynamicRouting, EmRouting, Routing
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.aggregators import run
from tests.helpers.models import TINY, make_batch
from tests.helpers.tensors import DOUBLE, saved_bytes
from tests.reference.naive_dlcl import layer_norm
from tests.reference.naive_routing import aggregate, dynamic_routing, em_routing, squash

T, B, C, L = 3, 2, 6, 3
KINDS = ("dynamic", "em")
every_kind = pytest.mark.parametrize("kind", KINDS)
both_norms = pytest.mark.parametrize("norm", ["pre", "post"])


def spread(module, size=0.4):
    """All parameters random, moderate in size: no share is lost to underflow in the naive form."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(size * torch.randn_like(parameter))
    return module


def named(part):
    return {
        "LN": None if part.layer_norm is None else (part.layer_norm.weight, part.layer_norm.bias),
        "W_1": part.fc1.weight,
        "b_1": part.fc1.bias,
        "W_2": part.fc2.weight,
        "b_2": part.fc2.bias,
        "W": part.vote.weight,
    }


def naive(aggregator, outputs, kind, iterations):
    norm = (aggregator.layer_norm.weight, aggregator.layer_norm.bias)
    betas = (aggregator.routing.beta_u, aggregator.routing.beta_a) if kind == "em" else ()
    parts = [named(part) for part in aggregator.maps]
    return aggregate(outputs, parts, kind, aggregator.capsules, iterations, norm, betas)


def random_votes(capsules, size, layers=L, **options):
    return torch.randn(layers, T, B, capsules, size, **{**DOUBLE, **options})


def split_votes(votes, t, b):
    """The votes of one position as the naive form takes them: votes[l][n]."""
    return [list(layer[t, b]) for layer in votes]


@every_kind
@both_norms
@pytest.mark.parametrize("iterations, capsules, hidden", [(3, None, None), (1, 2, None), (2, 3, 5), (4, 1, 9)])
def test_forward_and_gradients_equal_the_equation(kind, norm, iterations, capsules, hidden):
    options = {"iterations": iterations, "capsules": capsules, "hidden": hidden}
    aggregator = spread(Routing(Stack(L, C, norm == "pre"), kind=kind, **options)).double()
    layers = [torch.nn.Sequential(torch.nn.Linear(C, C), torch.nn.Tanh()).double() for _ in range(L)]
    y_0 = torch.randn(T, B, C, requires_grad=True, **DOUBLE)
    outputs = [layers[0](y_0)]
    for layer in layers[1:]:
        outputs.append(layer(outputs[-1]))
    expected, actual = naive(aggregator, outputs, kind, iterations), run(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    direction = torch.randn_like(actual)
    names = ["y_0", *(name for name, _ in aggregator.named_parameters())]
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    expected_grads = torch.autograd.grad(expected, sources, direction)
    actual_grads = torch.autograd.grad(actual, sources, direction)
    for name, want, got in itertools.zip_longest(names, expected_grads, actual_grads, fillvalue="layers"):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert want.abs().max() > 0, name


def test_the_reference_squashes():
    """|squash(s)| = |s|^2 / (1 + |s|^2), in the direction of s."""
    s = torch.tensor([3.0, 4.0], **DOUBLE)
    torch.testing.assert_close(squash(s), s / 5 * 25 / 26)


@pytest.mark.parametrize("capsules", [1, 2, 5])
def test_shares_of_dynamic_routing_sum_to_one(capsules):
    routing, votes = DynamicRouting(capsules, 3), random_votes(capsules, 4)
    out, shares = routing.step(votes, torch.randn(L, T, B, capsules, **DOUBLE))
    assert shares.shape == (L, T, B, capsules) and out.shape == (T, B, capsules, 4)
    torch.testing.assert_close(shares.sum(-1), torch.ones(L, T, B, **DOUBLE))
    found, c = dynamic_routing(split_votes(votes, 2, 1), 3)
    torch.testing.assert_close(routing(votes)[2, 1], torch.stack(found))
    assert all(float(sum(shares)) == pytest.approx(1) for shares in c)


@pytest.mark.parametrize("capsules", [1, 2, 5])
def test_shares_of_em_routing_sum_to_one(capsules):
    routing, votes = spread(EmRouting(capsules, 3)).double(), random_votes(capsules, 4)
    log_shares = torch.log_softmax(torch.randn(L, T, B, capsules, **DOUBLE), -1)
    log_shares = routing.e_step(votes, *routing.m_step(votes, log_shares))
    assert log_shares.shape == (L, T, B, capsules)
    torch.testing.assert_close(log_shares.exp().sum(-1), torch.ones(L, T, B, **DOUBLE))
    with torch.no_grad():
        found, r = em_routing(split_votes(votes, 2, 1), 3, routing.beta_u, routing.beta_a)
    torch.testing.assert_close(routing(votes)[2, 1], torch.stack(found))
    assert all(float(sum(shares)) == pytest.approx(1) for shares in r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_votes_are_their_mean(dtype):
    """Whatever the shares: mu is the vote and sigma 0; the shares of equal votes are equal in all layers."""
    routing, vote = EmRouting(4, 3).to(dtype), torch.randn(1, T, B, 4, 3, dtype=dtype)
    votes = vote.expand(L, -1, -1, -1, -1)
    log_shares = torch.log_softmax(5 * torch.randn(L, T, B, 4, dtype=dtype), -1)
    mean, variance, log_active = routing.m_step(votes, log_shares)
    torch.testing.assert_close(mean, vote[0])
    assert variance.max() < 1e-10
    log_shares = routing.e_step(votes, mean, variance, log_active)
    torch.testing.assert_close(log_shares, log_shares[:1].expand(L, -1, -1, -1))
    # sigma is sqrt(eps) = 1e-4 in all three dimensions, and each of the 4 capsules has a quarter of each layer
    active = 1 / (1 + math.exp(3 * math.log(1e-4) * L / 4))
    torch.testing.assert_close(routing(votes), active * vote[0], rtol=1e-4, atol=1e-5)


def test_a_close_vote_gets_the_larger_share():
    """Two capsules of which one is wide: a layer near the narrow one's mean belongs to that."""
    routing = EmRouting(2, 1).double()
    mean, variance = torch.zeros(1, 1, 2, 1, **DOUBLE), torch.tensor([1e-2, 4.0], **DOUBLE).view(1, 1, 2, 1)
    votes = torch.tensor([[0.01, 0.01], [3.0, 3.0]], **DOUBLE).view(2, 1, 1, 2, 1)
    log_shares = routing.e_step(votes, mean, variance, torch.zeros(1, 1, 2, **DOUBLE))
    shares = log_shares.exp().flatten(1)
    assert shares[0, 0] > 0.9 and shares[1, 1] > 0.9
    # the activation counts, too: log a = -20 takes the narrow one out
    log_active = torch.tensor([-20.0, 0.0], **DOUBLE).view(1, 1, 2)
    assert routing.e_step(votes, mean, variance, log_active).exp().flatten(1)[0, 1] > 0.99


def all_finite(aggregator, output, sources):
    output.float().sum().backward()
    assert output.isfinite().all()
    for source in (*sources, *aggregator.parameters()):
        assert source.grad is not None and source.grad.isfinite().all()


@every_kind
@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capsules", [None, 2, 1])
@pytest.mark.parametrize("case", ["equal votes", "zeros", "one layer", "constant", "large", "far apart"])
def test_no_nan_at_the_limits(kind, norm, dtype, capsules, case):
    layers = 1 if case == "one layer" else L
    aggregator = Routing(Stack(layers, 64, norm == "pre"), kind=kind, capsules=capsules)
    for part in aggregator.maps[1:] if case == "equal votes" else ():
        part.load_state_dict(aggregator.maps[0].state_dict())
    aggregator.to(dtype)
    x = torch.randn(63, 1, 64)
    outputs = {
        "equal votes": [x] * L,
        "zeros": [0 * x] * L,
        "one layer": [x],
        "constant": [torch.ones_like(x)] * L,
        "large": [500 * torch.randn_like(x) for _ in range(L)],
        "far apart": [x + 100 * index for index in range(L)],
    }[case]
    outputs = [y.detach().to(dtype).requires_grad_() for y in outputs]
    output = aggregator.finish(outputs)
    assert output.dtype == dtype and output.shape == (63, 1, 64)
    all_finite(aggregator, output, outputs)


def test_a_capsule_that_no_layer_counts_for():
    """Its share underflows in every layer, in fp32: no division of zero by zero."""
    routing = EmRouting(2, 3)
    votes = random_votes(2, 32, dtype=torch.float32)
    votes[..., 1, :] *= 1e4  # wide: its density is nowhere near that of the other
    votes.requires_grad_()
    log_shares = routing.e_step(votes, *routing.m_step(votes, torch.full((L, T, B, 2), 0.5).log()))
    assert log_shares[..., 1].exp().eq(0).all()
    out = routing(votes)
    out.sum().backward()
    assert out.isfinite().all() and votes.grad.isfinite().all()


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_routes_in_fp32(kind, dtype):
    aggregator = Routing(Stack(L, 64), kind=kind).to(dtype).eval()
    seen = []
    aggregator.routing.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    outputs = [torch.randn(5, 2, 64).to(dtype) for _ in range(L)]
    actual = aggregator.finish(outputs)
    assert seen == [(torch.float32, torch.float32)] and actual.dtype == dtype
    votes = torch.stack([part(y) for part, y in zip(aggregator.maps, outputs)])
    exact = aggregator.double().routing(votes.double().unflatten(-1, (64, 1))).flatten(-2)
    ones, zeros = torch.ones(64, **DOUBLE), torch.zeros(64, **DOUBLE)
    expected = layer_norm(exact, ones, zeros, eps=1e-12)
    torch.testing.assert_close(actual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@every_kind
@both_norms
@pytest.mark.parametrize("capsules", [None, 16])
def test_h_has_the_size_of_a_normalised_output_at_base_width(kind, norm, capsules):
    """Before its norm, dynamic routing with 512 capsules makes H about 5e-5: an eps of 1e-5 would leave it as small."""
    aggregator = Routing(Stack(6, 512, norm == "pre"), kind=kind, capsules=capsules)
    with torch.no_grad():
        output = aggregator.finish([torch.randn(7, 1, 512) for _ in range(6)])
    torch.testing.assert_close(output.std(dim=-1), torch.ones(7, 1), rtol=0.01, atol=0.0)


def test_autocast_and_mixed_dtypes():
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        aggregator = Routing(Stack(L, 16), kind=kind)
        outputs = [torch.randn(5, 2, 16, requires_grad=True) for _ in range(L)]
        plain = aggregator.finish(outputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = aggregator.finish([y.to(dtype) for y in outputs])
        assert output.dtype == dtype
        assert (output.float() - plain).abs().mean() < 0.1
        output.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in aggregator.parameters())


@every_kind
@pytest.mark.parametrize("recompute", [False, True], ids=["iterations", "all"])
def test_recomputation_changes_nothing(kind, recompute):
    """In training with dropout, against the same computation with everything kept."""
    results = []
    outputs = [torch.randn(T, B, C, requires_grad=True, **DOUBLE) for _ in range(L)]
    for kept in (True, False):
        torch.manual_seed(3)
        stack = Stack(L, C, dropout=0.3, activation_dropout=0.2, recompute=recompute)
        aggregator = Routing(stack, kind=kind).double()
        calls = []
        aggregator.routing.register_forward_pre_hook(lambda *_, calls=calls: calls.append("routing"))
        aggregator.maps[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append("map"))
        if kept:
            aggregator._recomputed_routing = lambda votes, routing=aggregator.routing: routing(votes)
            aggregator.recompute = False
        output = aggregator.finish(outputs)
        grads = torch.autograd.grad(output.square().sin().sum(), [*outputs, *aggregator.parameters()])
        results.append([output, *grads])
        assert calls == (["map", "routing"] if kept else ["map", "routing", *(["map"] * recompute), "routing"])
    for kept, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, kept)


def test_without_training_nothing_is_recomputed():
    for kind, recompute in itertools.product(KINDS, (False, True)):
        aggregator = Routing(Stack(L, C, recompute=recompute), kind=kind).eval()
        calls = []
        aggregator.routing.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        aggregator.finish([torch.randn(T, B, C, requires_grad=True) for _ in range(L)]).sum().backward()
        assert len(calls) == 1


@every_kind
def test_iterations_keep_the_votes_alone(kind):
    """What is kept for the backward pass does not grow with the number of iterations."""

    def kept(iterations, recomputed=True):
        aggregator = Routing(Stack(L, 64), kind=kind, iterations=iterations)
        if not recomputed:
            aggregator._recomputed_routing = lambda votes, routing=aggregator.routing: routing(votes)
        outputs = [torch.randn(32, 2, 64, requires_grad=True) for _ in range(L)]
        return saved_bytes(lambda: aggregator.finish(outputs), aggregator.parameters())

    assert kept(6) == kept(1)
    assert kept(6, recomputed=False) > 3 * kept(6), "the measure sees what plain iterations keep"


def test_dropout_acts_in_the_maps():
    stack = Stack(2, 8, dropout=0.3, activation_dropout=0.2)
    assert [(part.dropout.p, part.activation_dropout.p) for part in Routing(stack).maps] == [(0.3, 0.2)] * 2


def test_start_values():
    aggregator = Routing(Stack(2, 16))
    limit = (6 / (16 + 64)) ** 0.5
    for part in aggregator.maps:
        assert 0.9 * limit < part.fc1.weight.abs().max() <= limit
        assert 0.9 * limit < part.fc2.weight.abs().max() <= limit
        assert 0.9 * (6 / 32) ** 0.5 < part.vote.weight.abs().max() <= (6 / 32) ** 0.5
        assert not part.fc1.bias.any() and not part.fc2.bias.any()
    assert not aggregator.routing.beta_u.any() and not aggregator.routing.beta_a.any()


def test_the_state_is_the_outputs_and_is_not_kept():
    aggregator = Routing(Stack(L, C))
    before = {name: set(vars(module)) for name, module in aggregator.named_modules()}
    state = aggregator.start(torch.randn(T, B, C))
    outputs = list(torch.randn(L, T, B, C).unbind())
    for index, output in enumerate(outputs):
        assert aggregator.read(state, index) is (outputs[index - 1] if index else state[0])
        given = list(state)
        new = aggregator.write(state, index, output)
        assert all(a is b for a, b in zip(state, given)), "the old state is left as it was"
        state = new
    assert len(state) == L and all(a is b for a, b in zip(state, outputs)), "y_0 is no capsule"
    aggregator.finish(state)
    assert {name: set(vars(module)) for name, module in aggregator.named_modules()} == before


@every_kind
@both_norms
@pytest.mark.parametrize("flags", [{}, {"routing_capsules": 4, "routing_iterations": 2}], ids=["", "options"])
def test_a_model_learns_in_every_parameter(kind, norm, flags, build, batch):
    model = build(TINY[norm], layer_agg="routing", routing_kind=kind, **flags).train()
    assert model.encoder.layer_norm is None and model.decoder.layer_norm is None
    model(*batch)[0].log_softmax(-1)[..., 7].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@every_kind
@both_norms
def test_incremental_decoding_equals_full_decoding(kind, norm, build, dictionary):
    model = build(TINY[norm], layer_agg="routing", routing_kind=kind).eval().double()
    source, lengths, target = make_batch(dictionary, target_lengths=(9, 9, 9))
    state = {}
    with torch.no_grad():
        encoder_out = model.encoder(source, lengths)
        full = model.decoder(target, encoder_out=encoder_out)[0]
        for step in range(1, 10):
            last = model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)[0]
            torch.testing.assert_close(last[:, -1], full[:, step - 1], rtol=1e-6, atol=1e-6)


@every_kind
@both_norms
def test_padding_changes_nothing(kind, norm, build, dictionary):
    model = build(TINY[norm], layer_agg="routing", routing_kind=kind).eval().double()
    source, lengths, target = make_batch(dictionary, lengths=(5, 5), target_lengths=(6, 6))
    padding = torch.full((2, 3), dictionary.pad())
    with torch.no_grad():
        alone = model(source, lengths, target)[0]
        for padded in (torch.cat([padding, source], dim=1), torch.cat([source, padding], dim=1)):
            scores = model(padded, lengths, torch.cat([target, padding], dim=1))[0]
            torch.testing.assert_close(scores[:, :6], alone, rtol=1e-5, atol=1e-6)


@both_norms
def test_recomputed_models_agree(norm, build, batch):
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        flags = {"layer_agg": "routing", "checkpoint_activations": recompute, "dropout": 0.1}
        model = build(TINY[norm], **flags).train().double()
        assert model.decoder.aggregator.recompute is recompute
        torch.manual_seed(6)
        model(*batch)[0].square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, plain)


@every_kind
@both_norms
def test_parameter_count_of_a_stack(kind, norm):
    """9 C^2 and biases a layer, beta of EM routing, one norm."""
    for layers, dim in ((6, 512), (2, 32)):
        with torch.device("meta"):
            aggregator = Routing(Stack(layers, dim, norm == "pre"), kind=kind)
        map_size = 9 * dim**2 + 5 * dim + (2 * dim if norm == "pre" else 0)
        count = layers * map_size + 2 * dim + (2 * dim if kind == "em" else 0)
        assert sum(parameter.numel() for parameter in aggregator.parameters()) == count


def test_an_initialisation_fills_its_matrices(build):
    aggregator = Routing(Stack(L, C))
    shapes = [tuple(matrix.shape) for matrix in aggregator.matrices()]
    assert shapes == [(4 * C, C), (C, 4 * C), (C, C)] * L
    own = {id(parameter) for parameter in aggregator.parameters()}
    assert all(id(matrix) in own for matrix in aggregator.matrices())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kind": "emm"}, "--routing-kind emm is unknown: use one of dynamic, em"),
        ({"iterations": 0}, "--routing-iterations 0"),
        ({"capsules": 4}, "--routing-capsules 4 does not divide the width 6 of the encoder"),
        ({"capsules": 0}, "--routing-capsules 0"),
        ({"capsules": -2}, "--routing-capsules -2"),
        ({"hidden": 0}, "--routing-hidden 0"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(UsageError) as error:
        Routing(Stack(L, C), **options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"encoder_layers": 0}, "--encoder-layers 1 or more"),
        ({"decoder_memory": "transparent"}, "which --layer-agg routing removes: use a postnorm architecture"),
        ({"encoder_layerdrop": 0.1}, "omit --encoder-layerdrop"),
        ({"no_decoder_final_norm": True}, "--no-decoder-final-norm"),
        ({"routing_capsules": 5}, "--routing-capsules 5 does not divide the width 16 of the encoder"),
        ({"layer_agg": "dlcl", "routing_kind": "em"}, "--routing-kind has no effect"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY["pre"], **{"layer_agg": "routing", **flags})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_one_side_alone_and_other_methods_beside_it(build, batch):
    """Also a memory that reads single layers: for it H is the output of the last one."""
    for flags in (
        {"encoder_layer_agg": "routing"},
        {"layer_agg": "routing", "decoder_memory": "transparent"},
        {"layer_agg": "routing", "decoder_layer_agg": "dlcl"},
        {"layer_agg": "routing", "decoder_attn": "average", "deep_init": "lipschitz"},
    ):
        model = build(TINY["post"], **flags)
        model(*batch)[0].square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
