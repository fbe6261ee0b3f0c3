"""The ODE Transformer against its equations: values, every gradient, order of accuracy, whole models, bad input."""

import copy

import pytest
import torch

from fairseq_deep.core.aggregators.dlcl import Dlcl
from fairseq_deep.core.aggregators.ode import Ode
from fairseq_deep.core.aggregators.residual import Residual
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import MethodConfig, Stack
from tests.helpers.aggregators import make_layers
from tests.helpers.flags import parse
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import full_size, size_of
from tests.helpers.tensors import randomise
from tests.reference.naive_ode import run_stack

T, B, C, L = 7, 3, 12, 5
METHODS = ("rk2", "rk3", "rk4", "rk2-learned", "rk2-init", "ema1", "ema2", "ema3", "ema4")
CALLS = {name: int(name[2] if name[:2] == "rk" else name[3]) for name in METHODS}
TINY = "transformer_prenorm_2l2l_tiny"


def choice(name):
    """The options of a method, where a number after ema is its order."""
    return {"method": "ema", "order": int(name[3])} if name.startswith("ema") else {"method": name}


def flags(name, **more):
    chosen = {f"ode_{option}": value for option, value in choice(name).items()}
    return {"layer_agg": "ode", **chosen, **more}


def make(name, pre_norm=True, history="residual", identity=False, side="encoder", inner=None):
    return Ode(Stack(L, C, pre_norm, side), history=history, identity=identity, inner=inner, **choice(name))


def run(aggregator, y_0, layers):
    """As the loop of the encoder does it."""
    state = aggregator.start(y_0)
    for index, layer in enumerate(layers):
        x, outputs = aggregator.read(state, index), []
        for _ in range(aggregator.num_evaluations):
            outputs.append(layer(aggregator.next_input(x, outputs)))
        state = aggregator.write(state, index, aggregator.combine(x, outputs))
    return aggregator.finish(state)


def naive(aggregator, y_0, layers, name):
    dlcl, inner = None, aggregator.inner
    if isinstance(inner, Dlcl):
        norms = [(norm.weight, norm.bias) for norm in inner.layer_norms]
        dlcl = (inner.weight.view(L + 1, L + 1, -1), norms, inner.pre_norm)
    gate = None if aggregator.gate is None else (aggregator.gate.weight, aggregator.gate.bias)
    coefficients = {"gate": gate, "scalars": aggregator.scalars, "alpha": aggregator.alpha}
    return run_stack(y_0, layers, name, dlcl, identity=aggregator.identity, **coefficients)


CASES = [(name, history, pre_norm, False) for name in METHODS for history in ("residual", "dlcl")
         for pre_norm in (True, False)]  # fmt: skip
CASES += [(name, "dlcl", True, True) for name in METHODS if name != "ema1"]


@pytest.mark.parametrize(
    "name, history, pre_norm, identity", CASES, ids=lambda v: str({True: "y", False: "n"}.get(v, v))
)
def test_forward_and_gradients_equal_the_equations(name, history, pre_norm, identity):
    aggregator = randomise(make(name, pre_norm, history, identity).double())
    layers = make_layers(L, C)
    y_0 = torch.randn(T, B, C, dtype=torch.float64, requires_grad=True)
    sources = [y_0, *aggregator.parameters(), *(p for layer in layers for p in layer.parameters())]
    direction = torch.randn(T, B, C, dtype=torch.float64)
    expected, actual = naive(aggregator, y_0, layers, name)[1], run(aggregator, y_0, layers)
    torch.testing.assert_close(actual, expected)
    expected_grads = torch.autograd.grad(expected, sources, direction)
    for want, got in zip(expected_grads, torch.autograd.grad(actual, sources, direction)):
        torch.testing.assert_close(got, want)
        assert want.any()


@pytest.mark.parametrize("name, order", [("ema1", 1), ("rk2", 2), ("rk3", 3), ("rk4", 4)])
def test_a_step_of_a_linear_layer_is_the_exponential_to_its_order(name, order):
    """x' = G x has the solution exp(G): a step of RK2 is I + G + G^2 / 2, and so on."""
    matrix = torch.randn(C, C, dtype=torch.float64)
    eye = term = expected = torch.eye(C, dtype=torch.float64)
    for power in range(1, order + 1):
        term = term @ matrix / power
        expected = expected + term
    aggregator = Ode(Stack(1, C), **choice(name))
    torch.testing.assert_close(run(aggregator, eye.view(C, 1, C), [lambda x: x + x @ matrix]).view(C, C), expected)


@pytest.mark.parametrize("history, plain", [("residual", Residual), ("dlcl", Dlcl)])
def test_one_evaluation_is_the_plain_stack(history, plain):
    aggregator = make("ema1", history=history)
    assert aggregator.num_evaluations == 1
    layers, y_0 = make_layers(L, C, torch.float32), torch.randn(T, B, C)
    state, other = aggregator.start(y_0), plain(Stack(L, C))
    expected = other.start(y_0)
    for index, layer in enumerate(layers):
        state = aggregator.write(state, index, layer(aggregator.read(state, index)))
        expected = other.write(expected, index, layer(other.read(expected, index)))
    assert torch.equal(aggregator.finish(state), other.finish(expected))
    assert len(list(aggregator.parameters())) == len(list(other.parameters()))


def test_start_values():
    gate = make("rk2-learned").gate
    bound = (6 / (2 * C + 1)) ** 0.5
    assert gate.weight.abs().max() <= bound and gate.weight.std() > bound / 4 and not gate.bias.any()
    assert make("rk2-init").scalars.tolist() == [1, 1]
    assert make("ema3").alpha.tolist() == [0.5]
    assert Ode(Stack(L, C)).fixed == [0.5, 0.5], "the default is rk2"
    assert Ode(Stack(L, C), method="ema").num_evaluations == 2


def test_identity_grows_as_documented():
    """A layer that does nothing: y = 2.5 x with the identity, y = x without."""
    x = torch.ones(1, 1, C)
    for identity, value in ((True, 2.5), (False, 1.0)):
        aggregator = make("rk2", history="dlcl", identity=identity)
        assert aggregator.combine(x, [x, aggregator.next_input(x, [x])]).unique().tolist() == [value]


@pytest.mark.parametrize("name", METHODS)
def test_a_decoder_has_the_inner_aggregator_alone(name):
    inner = MethodConfig("dlcl", Dlcl, {"window": 2})
    decoder = make(name, identity=CALLS[name] > 1, history="dlcl", inner=inner, side="decoder")
    assert decoder.num_evaluations == Ode.layout("decoder", choice(name)).num_evaluations == 1
    assert Ode.layout("encoder", choice(name)).num_evaluations == make(name).num_evaluations == CALLS[name]
    assert {key.partition(".")[0] for key in decoder.state_dict()} == {"inner"}
    assert decoder.inner.window == 2
    assert torch.equal(decoder.weights(), decoder.inner.weights()) and decoder.record().keys() == {
        "newest", "previous", "older", "embedding"
    }  # fmt: skip


def test_what_is_learned_is_shown():
    record = make("ema2").record()
    assert {key: float(value) for key, value in record.items()} == {"alpha": 0.5}
    assert set(make("rk2-init", history="dlcl").record()) >= {"first", "second", "newest"}
    assert make("rk2").record() == {} and make("rk2").weights() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_takes_differences_in_fp32(name, dtype):
    """Sums are rounded once: beside x = 100, changes of 1 are not lost."""
    aggregator = randomise(make(name, history="dlcl"))
    own = {key: value.clone() for key, value in aggregator.state_dict().items() if not key.startswith("inner.")}
    half = copy.deepcopy(aggregator).to(dtype)
    for key, value in own.items():
        assert torch.equal(half.state_dict()[key], value), "coefficients stay as they were, in fp32"
    assert half.inner.layer_norms[0].weight.dtype == dtype and half.inner.weight.dtype == torch.float32
    x, outputs, exact_outputs = (100 * torch.randn(T, B, C)).to(dtype), [], []
    for _ in range(aggregator.num_evaluations):
        point = half.next_input(x, outputs)
        assert point.dtype == dtype
        outputs.append(point + torch.randn_like(point))
        exact_outputs.append(outputs[-1].double())
    if aggregator.num_evaluations == 2:  # more evaluations continue from points that were rounded
        exact = copy.deepcopy(aggregator).double().combine(x.double(), exact_outputs)
        torch.testing.assert_close(half.combine(x, outputs), exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-2)
    leaves = [output.requires_grad_() for output in outputs]
    half.combine(x, leaves).float().square().sum().backward()
    # Heun's method ends at (x + o_2) / 2: o_1 is where o_2 was evaluated, and nothing else
    assert [leaf.grad is None for leaf in leaves] == [name == "rk2", False, False, False][: len(leaves)]
    assert all(leaf.grad.dtype == dtype for leaf in leaves if leaf.grad is not None)
    assert all(value.grad.dtype == torch.float32 and value.grad.any() for value in half.fp32_tensors())
    half.double().to(dtype)
    assert all(value.grad.dtype == value.dtype == torch.float32 for value in half.fp32_tensors())


MODELS = {
    "rk2": flags("rk2"),
    "rk4": flags("rk4"),
    "learned": flags("rk2-learned", ode_history="dlcl", dlcl_weight_type="scalar_2"),
    "identity": flags("rk2-learned", ode_history="dlcl", ode_identity=True),
    "relative": flags("ema3", ode_history="dlcl", relative_positions=2, relative_values=True),
    "encoder": {"encoder_layer_agg": "ode", "ode_method": "rk2-init", "decoder_layer_agg": "dlcl"},
    "postnorm": flags("rk2-init", deep_init="ds", encoder_normalize_before=False, decoder_normalize_before=False),
    "transparent": flags("ema2", decoder_memory="transparent", decoder_attn="merged"),
}


@pytest.mark.parametrize("invariance", sorted(INVARIANCES))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_whole_model(name, invariance, build, dictionary):
    INVARIANCES[invariance](lambda **more: build(TINY, **{**MODELS[name], **more}), dictionary)


@pytest.mark.parametrize("name", METHODS)
def test_the_encoder_evaluates_its_layers_as_the_equations_say(name, build, batch):
    model = build(TINY, **flags(name, ode_history="dlcl", encoder_layers=L)).double().eval()
    encoder, (source, lengths, _) = model.encoder, batch
    randomise(encoder.aggregator.inner)
    calls = [0] * L
    for index, layer in enumerate(encoder.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    out = encoder(source, lengths, return_all_hiddens=True)
    assert calls == [CALLS[name]] * L
    padding = source.eq(encoder.padding_idx)
    layers = [lambda x, layer=layer: layer(x, padding) for layer in encoder.layers]
    states, expected = naive(encoder.aggregator, out["encoder_states"][0], layers, name)
    words = ~padding.T
    torch.testing.assert_close(out["encoder_out"][0][words], encoder.layer_norm(expected)[words])
    assert len(out["encoder_states"]) == L + 1
    for actual, state in zip(out["encoder_states"], states):
        torch.testing.assert_close(actual[words], state[words])


def test_one_evaluation_makes_the_plain_model(build, batch):
    model, plain = build(TINY, **flags("ema1")).eval(), build(TINY).eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(*batch)[0], plain(*batch)[0])


def size(name, vocab, **more):
    return size_of(full_size(name, vocab, share_all_embeddings=True, **more))


@pytest.mark.parametrize(
    "options, added",
    [
        (flags("rk2"), 0),
        (flags("rk4"), 0),
        (flags("rk2-learned"), 2 * 512 + 1),
        (flags("rk2-init"), 2),
        (flags("ema4"), 1),
        (flags("ema1"), 0),
        (flags("rk2-learned", ode_history="dlcl"), 6 * 2 * 512 * 2 + 2 * 7 * 7 + 2 * 512 + 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_parameters_that_it_adds(options, added):
    assert size("transformer_prenorm_6l", 34040, **options) == 61569024 + added


def test_parameters_of_the_published_systems():
    """24 and 6 layers, and 12 and 6 of the big model; the spec's fitted counts have a layout of their own."""
    system = flags("rk2-learned", ode_history="dlcl", relative_values=True)
    assert size("transformer_prenorm_24l", 35628, relative_positions=8, **system) == 119217315
    assert size("transformer_prenorm_6l_big", 35628, relative_positions=16, encoder_layers=12, **system) == 288525531


@pytest.mark.parametrize(
    "more, words",
    [
        ({"ode_method": "rk5"}, "--ode-method rk5 is unknown (did you mean rk"),
        ({"ode_method": "euler"}, "use one of rk2, rk3, rk4, rk2-learned, rk2-init, ema"),
        ({"ode_order": 2}, "--ode-order requires --ode-method ema, rk2 has a fixed order"),
        ({"ode_order": 3, "ode_method": "rk4"}, "rk4 has a fixed order"),
        ({"ode_order": 0, "ode_method": "ema"}, "--ode-order 0 must be from 1 to 4"),
        ({"ode_order": 5, "ode_method": "ema"}, "--ode-order 5 must be from 1 to 4"),
        ({"ode_order": -1, "ode_method": "ema"}, "--ode-order -1"),
        ({"ode_history": "dclc"}, "--ode-history dclc is unknown (did you mean dlcl?)"),
        ({"ode_history": "ode"}, "--ode-history ode is unknown"),
        ({"ode_history": "lstm"}, "use one of residual, dlcl"),
        ({"ode_identity": True}, "add --ode-history dlcl, or omit it"),
        ({"ode_identity": True, "ode_history": "dlcl", "dlcl_no_norm": True}, "the norms that --dlcl-no-norm removes"),
        (
            {"ode_identity": True, "ode_history": "dlcl", "encoder_normalize_before": False},
            "--ode-identity requires the norms of pre-norm DLCL",
        ),
        (
            {"ode_identity": True, "ode_history": "dlcl", "ode_method": "ema", "ode_order": 1},
            "--ode-identity has no effect with --ode-order 1",
        ),
        ({"decoder_layer_agg": "ode"}, "--layer-agg ode requires an encoder"),
        ({"encoder_layer_agg": "residual"}, "requires an encoder, and --decoder-layer-agg"),
        ({"encoder_layer_agg": "dlcl", "ode_history": "dlcl"}, "another --decoder-layer-agg"),
        ({"encoder_layerdrop": 0.1}, "omit --encoder-layerdrop"),
        ({"encoder_layers_to_keep": "0"}, "omit --encoder-layers-to-keep"),
        ({"dlcl_window": 2}, "--dlcl-window has no effect without"),
        ({"ode_history": "dlcl", "dlcl_window": 0}, "--dlcl-window 0"),
        ({"ode_history": "dlcl", "dlcl_no_norm": True, "encoder_normalize_before": False}, "--dlcl-no-norm requires"),
        ({"layer_agg": "dlcl", "ode_method": "rk4"}, "--ode-method has no effect without --layer-agg ode"),
        ({"layer_agg": "dlcl", "ode_identity": True}, "--ode-identity has no effect without --layer-agg ode"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_flags_are_refused_in_one_line(more, words, build):
    with pytest.raises(UsageError) as error:
        build(TINY, **{"layer_agg": "ode", **more})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "pre_norm, more, words",
    [
        (True, {"method": "rk2learned"}, "did you mean rk2-learned?"),
        (True, {"history": "ode"}, "--ode-history ode"),
        (True, {"identity": True}, "add --ode-history dlcl"),
        (False, {"identity": True, "history": "dlcl"}, "pre-norm"),
        (True, {"identity": True, "inner": MethodConfig("dlcl", Dlcl, {"no_norm": True})}, "--dlcl-no-norm"),
    ],
)
def test_the_constructor_refuses_too(pre_norm, more, words):
    with pytest.raises(UsageError) as error:
        Ode(Stack(L, C, pre_norm), **more)
    assert words in str(error.value)


def test_the_check_comes_before_a_model_is_built(monkeypatch):
    """``check`` refuses what the constructor refuses, and asks the inner aggregator."""
    inner = MethodConfig("dlcl", Dlcl)
    stack = Stack(L, C, False, aggregator=MethodConfig("ode", Ode))
    with pytest.raises(UsageError, match="pre-norm"):
        Ode.check(stack, stack, {"history": "dlcl", "identity": True, "inner": inner})
    asked = []
    monkeypatch.setattr(Dlcl, "check", lambda *args: asked.append(args))
    Ode.check(stack, stack, {"history": "dlcl", "inner": inner})
    assert asked == [(stack, stack, inner.options)], "the inner aggregator says what it cannot do, too"


def test_the_command_line_sets_the_options():
    line = ["--arch", TINY, "--layer-agg", "ode", "--ode-method", "ema", "--ode-order", "3"]
    args = parse(*line, "--ode-history", "dlcl", "--ode-identity")
    assert (args.ode_method, args.ode_order, args.ode_history, args.ode_identity) == ("ema", 3, "dlcl", True)
    with pytest.raises(SystemExit):
        parse(*line[:-1], "two")


def test_ddp_sees_each_parameter_once_with_recomputation(build, batch, tmp_path):
    """A layer that the re-entrant form recomputes twice would be marked ready twice."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        grads = []
        for recompute in (False, True):
            torch.manual_seed(3)
            model = build(TINY, **flags("rk2-learned"), dropout=0.1, checkpoint_activations=recompute).train()
            torch.nn.parallel.DistributedDataParallel(model)(*batch)[0].square().mean().backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        for plain, recomputed in zip(*grads):
            torch.testing.assert_close(recomputed, plain)
    finally:
        torch.distributed.destroy_process_group()
