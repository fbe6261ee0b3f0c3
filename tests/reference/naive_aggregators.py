"""The equations of all aggregators but depth-wise LSTMs and MSC, with the parameters of a module of ours."""

from tests.helpers.equations import affine

from . import naive_aggregation, naive_bare, naive_dlcl, naive_mlrf, naive_ode, naive_routing
from .naive_gtrans import gtrans
from .naive_hyper import hyper_connections
from .naive_mudd import mudd

PLAIN_DECODERS = ("gtrans", "mlrf")
NAMES = ("attention-residual", "dlcl", "gtrans", "hierarchical", "hyper-connections", "iterative", "linear", "lstm",
         "mlrf", "msc", "mudd", "ode", "residual", "residual-dual", "rnn", "routing")  # fmt: skip
"""The methods of :func:`path` and ``naive_model``; others have their equations in their test files."""


def path(name, aggregator, y_0, layers, side="encoder", **options):
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
    return naive_ode.run_stack(y_0, layers, name, dlcl, identity=identity, **learned)


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
