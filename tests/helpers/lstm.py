"""Depth-wise LSTMs: one from numbers, and its parameters by their names in the equations."""

import itertools

from fairseq_deep.core.aggregators.lstm import DepthwiseLstm
from fairseq_deep.core.stack import Stack


def make(kind, layers, dim, decoder=False, dropout=0.0, activation_dropout=0.0, recompute=False, **options):
    """The aggregator *kind* of a stack with these numbers."""
    side = "decoder" if decoder else "encoder"
    numbers = {"dropout": dropout, "activation_dropout": activation_dropout, "recompute": recompute}
    return kind(Stack(layers, dim, side=side, layout=kind.layout(side, options), **numbers), **options)


def named_step(aggregator, gates, hidden):
    """The parameters of one step by their names in the equations, from the modules with these indices."""
    hidden = aggregator.hidden[hidden]
    step = {
        "W_h1": hidden.fc1.weight,
        "LN_h": (hidden.layer_norm.weight, hidden.layer_norm.bias),
        "W_h2": None if hidden.fc2 is None else hidden.fc2.weight,
    }
    for name, linear in (("b_h1", hidden.fc1), ("b_h2", hidden.fc2)):
        if linear is not None and linear.bias is not None:
            step[name] = linear.bias
    if gates is not None:
        dim, gates = aggregator.dim, aggregator.gates[gates]
        for row, gate in enumerate("ifo"):
            step[f"W_{gate}"] = gates.weight[row * dim : (row + 1) * dim]
            if gates.bias is not None:
                step[f"b_{gate}"] = gates.bias[row * dim : (row + 1) * dim]
            step[f"LN_{gate}"] = gates.norm_weight[row], gates.norm_bias[row]
    return step


def named_steps(aggregator, share, places):
    """Those of all steps, for the sharing mode and the number of steps a layer."""
    gated = type(aggregator) is DepthwiseLstm
    steps = []
    for layer, place in itertools.product(range(aggregator.num_layers // places), range(places)):
        own, common = layer * places + place, place
        gates = own if share == "none" else common
        steps.append(named_step(aggregator, gates if gated else None, common if share == "all" else own))
    return steps


def aggregators(model):
    return model.encoder.aggregator, model.decoder.aggregator
