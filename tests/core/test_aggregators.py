"""Every aggregator against its equations: all values and gradients, alone and in whole models.

Depth-wise LSTMs are in ``test_whole_models.py``, multiscale collaboration is in ``test_memories.py``.
"""

import functools
import itertools

import pytest
import torch

from fairseq_deep.core.aggregators import AGGREGATORS
from tests.helpers.aggregators import make, make_layers, read_path, run
from tests.helpers.equations import affine
from tests.helpers.models import TINY
from tests.helpers.tensors import DOUBLE, shake
from tests.reference import naive_aggregation, naive_bare, naive_dlcl, naive_mlrf, naive_ode, naive_routing
from tests.reference.naive_gtrans import gtrans
from tests.reference.naive_hyper import hyper_connections
from tests.reference.naive_mudd import mudd

T, B, C = 3, 2, 12


def grid(**values):
    """All combinations of these options."""
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


RUNGE_KUTTA = ("rk2", "rk3", "rk4", "rk2-learned", "rk2-init")
SCHEMES = [*grid(method=RUNGE_KUTTA), *grid(method=["ema"], order=[1, 2, 3, 4])]
FUSIONS = [{"kind": "mean"}, *grid(kind=["learned"], weights=["softmax", "linear"]), {"kind": "ffn"},
           {"kind": "ffn", "hidden": 5}, {"kind": "multi-hop"}, {"kind": "multi-hop", "hidden": 7, "hops": 1},
           {"kind": "multi-hop", "hops": 3}]  # fmt: skip
ROUTINGS = [{"iterations": 3}, {"iterations": 1, "capsules": 2}, {"iterations": 2, "capsules": 3, "hidden": 5},
            {"iterations": 4, "capsules": 1, "hidden": 9}]  # fmt: skip
OPTIONS = {  # what changes the equation, and depths: those that blocks divide and do not divide
    "residual": [(3, {})],
    "dlcl": [
        *((5, options) for options in grid(weight_type=["scalar", "scalar_3", "vector"], normalize=[False, True],
                                           window=[None, 1, 2], norm_first=[False, True])),
        *((5, {"fixed": True, "no_norm": True, "init": init}) for init in ("avg", "one")),
    ],  # fmt: skip
    "hierarchical": [
        *((depth, {}) for depth in range(1, 8)),
        *((depth, {"block": block}) for block in (1, 3, 9) for depth in (1, 4, 6)),
    ],
    "iterative": [(depth, {}) for depth in (1, 2, 5)],
    "linear": [(depth, {}) for depth in (1, 2, 5)],
    "mudd": [(depth, {}) for depth in (0, 1, 4)],
    "residual-dual": [(3, {})],
    "attention-residual": [(3, {}), *((3, {"block": block}) for block in (1, 2, 4, 6, 20))],
    "hyper-connections": [(2, row) for row in grid(kind=["dynamic", "static", "manifold"], streams=[1, 2, 4])],
    "gtrans": [(5, row) for row in grid(group_layers=[1, 2, 3, 5, 8])],
    "mlrf": [(5, row) for row in FUSIONS],
    "routing": [(3, {"kind": kind, **row}) for kind in ("dynamic", "em") for row in ROUTINGS],
    "ode": [
        *((5, {**row, "history": history}) for row in SCHEMES for history in ("residual", "dlcl")),
        *((5, {**row, "history": "dlcl", "identity": True}) for row in SCHEMES if row.get("order") != 1),
    ],
}
CASES = [
    pytest.param(name, depth, options, side, norm, id=f"{name}-{depth}-{options}-{side}-{norm}".replace("'", ""))
    for name, rows in OPTIONS.items()
    for (depth, options), side, norm in itertools.product(rows, ("encoder", "decoder"), TINY)
    if norm == "pre" or not {"no_norm", "identity"} & options.keys()
]
PLAIN_DECODERS = ("gtrans", "mlrf")
SPLIT = ("residual-dual", "attention-residual", "hyper-connections")


def naive(name, aggregator, y_0, layers, side="encoder", **options):
    """What the layers read, as far as the plain form tells it, and the output, with the weights of *aggregator*."""
    if name == "ode" and side == "decoder":
        name, aggregator = options.get("history", "residual"), aggregator.inner
    if name == "residual" or side == "decoder" and name in PLAIN_DECODERS:
        return [y_0, *naive_aggregation.plain_outputs(y_0, layers)]
    if name == "mudd":
        weights = [(hidden.weight.T, out.weight.T, out.bias) for hidden, out in zip(aggregator.hidden, aggregator.out)]
        return mudd(y_0, layers, weights)
    if name == "residual-dual":
        norms, dual = map(affine, aggregator.norms), affine(aggregator.dual_norm)
        path, output = naive_bare.residual_dual(y_0, layers, norms, dual)
        return [*path[:-1], output]
    if name == "attention-residual":
        return naive_bare.attention_residual(y_0, layers, aggregator.query, aggregator.gain, options.get("block", 1))
    if name == "hyper-connections":
        kind, streams = options.get("kind", "dynamic"), options.get("streams", 4)
        return hyper_connections(y_0, layers, aggregator.mixers, kind, streams)
    if name == "ode":
        return [naive_steps(aggregator, y_0, layers, **options)]
    if name == "dlcl":
        return [naive_dlcl.run_stack(y_0, layers, *sums(aggregator, **options)[:3], **sums(aggregator, **options)[3])]
    return [NAIVE[name](aggregator, y_0, layers, **options)]


def sums(aggregator, window=None, normalize=False, **_):
    """What ``naive_dlcl`` takes."""
    size = aggregator.num_layers + 1
    more = {"window": window, "normalize": normalize, "first_norm": affine(aggregator.first_norm)}
    return aggregator.weight.view(size, size, -1), list(map(affine, aggregator.layer_norms)), aggregator.pre_norm, more


def naive_steps(aggregator, y_0, layers, method="rk2", order=2, history="residual", identity=False):
    dlcl = sums(aggregator.inner)[:3] if history == "dlcl" else None
    learned = {"gate": affine(aggregator.gate), "scalars": aggregator.scalars, "alpha": aggregator.alpha}
    name = f"ema{order}" if method == "ema" else method
    return naive_ode.run_stack(y_0, layers, name, dlcl, identity=identity, **learned)[1]


def naive_routing_of(aggregator, y_0, layers, kind="em", iterations=3, capsules=None, **_):
    maps = [{"LN": affine(part.layer_norm), "W_1": part.fc1.weight, "b_1": part.fc1.bias, "W_2": part.fc2.weight,
             "b_2": part.fc2.bias, "W": part.vote.weight} for part in aggregator.maps]  # fmt: skip
    betas = (aggregator.routing.beta_u, aggregator.routing.beta_a) if kind == "em" else ()
    outputs = naive_aggregation.plain_outputs(y_0, layers)
    norm = affine(aggregator.layer_norm)
    return naive_routing.aggregate(outputs, maps, kind, capsules or y_0.size(-1), iterations, norm, betas)


def naive_fusion(aggregator, y_0, layers, kind="learned", weights="softmax", **_):
    fusion = aggregator.fusion
    function = {
        "mean": naive_mlrf.mean,
        "learned": lambda y: naive_mlrf.learned(y, fusion.weight, weights == "softmax"),
        "ffn": lambda y: naive_mlrf.ffn(y, *fusion.parameters()),
        "multi-hop": lambda y: naive_mlrf.multi_hop(
            y, fusion.hidden.weight.T, fusion.hops.weight.T, fusion.out.weight
        ),
    }[kind]
    norms = list(map(affine, aggregator.layer_norms))
    outputs = naive_aggregation.plain_outputs(y_0, layers)
    return naive_mlrf.fuse(outputs, function, norms, affine(aggregator.final_norm))


def naive_groups(aggregator, y_0, layers, group_layers=3):
    return gtrans(y_0, layers, aggregator.fusion.weight, group_layers, affine(aggregator.fusion_norm))


def nodes(aggregator):
    return [(*node.fc1.parameters(), *node.fc2.parameters(), *affine(node.layer_norm)) for node in aggregator.nodes]


def matrices(aggregator, y_0):
    return aggregator.matrix.split(y_0.size(-1), dim=1)


NAIVE = {
    "gtrans": naive_groups,
    "hierarchical": lambda a, y_0, layers, block=2: naive_aggregation.hierarchical(y_0, layers, nodes(a), block),
    "iterative": lambda a, y_0, layers: naive_aggregation.iterative(y_0, layers, nodes(a)),
    "linear": lambda a, y_0, layers: naive_aggregation.linear(y_0, layers, matrices(a, y_0)),
    "mlrf": naive_fusion,
    "routing": naive_routing_of,
}


NEAR = {"rtol": 1e-7, "atol": 1e-9}


def assert_same(actual, expected, named, unused):
    """Values, and in one random direction the gradients of all *named* tensors, of which some may be *unused*."""
    torch.testing.assert_close(actual, expected, **NEAR)
    direction = torch.randn_like(actual)
    wanted, found = (torch.autograd.grad(y, list(named.values()), direction, retain_graph=True, allow_unused=True)
                     for y in (expected, actual))  # fmt: skip
    for (key, tensor), want, got in zip(named.items(), wanted, found):
        want, got = (torch.zeros_like(tensor) if grad is None else grad for grad in (want, got))
        torch.testing.assert_close(got, want, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
        assert want.any() or unused, key


def test_every_aggregator_is_tested():
    assert {*OPTIONS} == {*AGGREGATORS.names()} - {"lstm", "rnn", "msc"}, "which have files of their own"


@pytest.mark.parametrize("name, depth, options, side, norm", CASES)
def test_values_and_gradients_equal_the_equations(name, depth, options, side, norm):
    """With and without autograd, which have forms of their own."""
    aggregator = shake(make(name, depth, C, norm, side, **options).double())
    layers, y_0 = make_layers(aggregator.num_layers, C), torch.randn(T, B, C, **DOUBLE).requires_grad_()
    expected = torch.stack(naive(name, aggregator, y_0, layers, side, **options))
    actual = torch.stack(read_path(aggregator, y_0, layers)[-len(expected) :])
    named = {"y_0": y_0, **dict(aggregator.named_parameters())}
    named.update({f"layer {index}": p for index, layer in enumerate(layers) for p in layer.parameters()})
    assert_same(actual, expected, named, unused=name == "dlcl")  # a softmax over one entry, norms out of the window
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(read_path(aggregator, y_0, layers)[-len(expected) :]), expected, **NEAR)


MODELS = [
    *itertools.product([(name, {"capsules": 2} if name == "routing" else {}) for name in OPTIONS], TINY),
    *((row, "pre") for row in [
        ("dlcl", {"weight_type": "scalar_2", "window": 2}),
        ("gtrans", {"group_layers": 2}),
        ("attention-residual", {"block": 4}),
        ("hyper-connections", {"kind": "manifold"}),
        *(("ode", {**scheme, "history": "dlcl"}) for scheme in SCHEMES),
    ]),
]  # fmt: skip


def flags_of(name, options):
    prefix = name.replace("-", "_")
    return {"layer_agg": name, **{f"{prefix}_{option}": value for option, value in options.items()}}


@pytest.mark.parametrize("method, norm", MODELS, ids=str)
def test_whole_models_equal_the_equations(method, norm, build, batch):
    """All gradients, the final norm, and the states y_0 ... y_L that memories read; depths of 3 and 2."""
    name, options = method
    model = build(TINY[norm], **flags_of(name, options), encoder_layers=3).double().eval()
    shake(model.encoder.aggregator), shake(model.decoder.aggregator)
    shared, inputs = {}, {}
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:  # of several evaluations the first reads x
            layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: inputs.get(layer, args[0])}))
            layer.register_forward_pre_hook(lambda _, args, stack=stack: shared.update({stack: args[1:2]}))
    encoded = model.encoder(*batch[:2], return_all_hiddens=True)
    features, extra = model.decoder.extract_features(batch[2], encoder_out=encoded)
    for stack, states, actual in (
        (model.encoder, encoded["encoder_states"], encoded["encoder_out"][0]),
        (model.decoder, extra["inner_states"], features.transpose(0, 1)),
    ):
        def call(x, layer, stack=stack):
            output = layer(x, *shared[stack])
            return output[0] if isinstance(output, tuple) else output

        layers = [functools.partial(call, layer=layer) for layer in stack.layers]
        path = naive(name, stack.aggregator, states[0], layers, stack.stack.side, **options)
        expected = path[-1] if stack.layer_norm is None else stack.layer_norm(path[-1])
        assert_same(actual, expected, dict(stack.named_parameters()), unused=True)
        read = [inputs[layer] for layer in stack.layers[:: stack.modules_per_layer]]
        if name not in ("dlcl", "mudd") and options.get("history") != "dlcl":  # which read more than the last output
            torch.testing.assert_close(states[1:-1], read[1:], **NEAR)
        if name in SPLIT or name == "hierarchical":
            torch.testing.assert_close(states[-1], path[-1], **NEAR)
        assert len(states) == len(read) + 1


# --- special cases in which a method is the plain stack


def plain_name(key, flags):
    """The name in the plain model of a parameter of a model, whose layers may be split; None if it has none there."""
    side, part, *rest = key.split(".")
    attentions = ["encoder_attn"] if flags.get("decoder_attn") == "merged" else ["self_attn", "encoder_attn"]
    sublayers = ["self_attn", "final"] if side == "encoder" else [*attentions, "final"]
    count = len(sublayers) if flags["layer_agg"] in SPLIT else 1
    if part == "layers":
        return ".".join([side, part, str(int(rest[0]) // count), *rest[1:]])
    if part == "history" and rest[0] == "norms":
        index = int(rest[1])
        return f"{side}.layers.{index // count}.{sublayers[index % count]}_layer_norm.{rest[2]}"
    return None if part == "history" else key


def without_r(aggregator):
    torch.nn.init.zeros_(aggregator.dual_norm.weight)
    torch.nn.init.zeros_(aggregator.dual_norm.bias)


def last_group_only(aggregator):
    if aggregator.fusion is not None:
        aggregator.fusion.weight.data.copy_(torch.tensor([0.0, 1.0]))


MERGED = {"decoder_attn": "merged"}
PLAIN = [  # norm, method, options, more flags, what makes it plain if its start does not
    *((norm, "mudd", {}, {}, None) for norm in TINY),
    *((norm, "linear", {}, {}, None) for norm in TINY),
    ("pre", "dlcl", {"init": "last", "no_norm": True}, {}, None),  # DenseFormer
    ("pre", "ode", {"method": "ema", "order": 1}, {}, None),
    ("pre", "gtrans", {}, {}, None),  # one group
    ("pre", "gtrans", {"group_layers": 2}, {"encoder_layers": 4}, last_group_only),
    *(("pre", "hyper-connections", row, {}, None) for row in grid(kind=["dynamic", "static", "manifold"],
                                                                   streams=[1, 4])),
    *(("post", "residual-dual", {}, more, without_r) for more in ({}, MERGED)),
    # a sum and a mean are the same to the norms that follow
    *(("pre", "attention-residual", {"block": block}, more, None) for block in (1, 3) for more in ({}, MERGED)),
]  # fmt: skip


@pytest.mark.parametrize(
    "norm, name, options, more, change", PLAIN, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_special_case_is_the_plain_model(norm, name, options, more, change, build, batch):
    flags = {**flags_of(name, options), **more}
    model, plain = build(TINY[norm], **flags).double().eval(), build(TINY[norm], **more).double().eval()
    aggregators = model.encoder.aggregator, model.decoder.aggregator
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if plain_name(key, flags):  # so that no gain is 1 and no bias 0
                parameter.add_(0.1 * torch.randn_like(parameter))
    for aggregator in aggregators if change else ():
        change(aggregator)
    for module in [*model.modules(), *plain.modules()] if name == "attention-residual" else ():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-20
    weights = {plain_name(key, flags): value for key, value in model.named_parameters()}
    weights.pop(None, None)
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(model(*batch)[0], plain(*batch)[0], rtol=1e-10, atol=1e-10)
    if any(list(shake(aggregator).parameters()) for aggregator in aggregators):
        assert not torch.allclose(model(*batch)[0], plain(*batch)[0], rtol=0.01)


@pytest.mark.parametrize("name", sorted({*OPTIONS} - {"gtrans", "mlrf", "routing", *SPLIT}))
def test_a_stack_without_layers_passes_the_embeddings_on(name):
    x = torch.randn(T, B, C)
    torch.testing.assert_close(run(make(name, 0, C), x, []), x)
