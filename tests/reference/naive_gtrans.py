"""The encoder of GTrans from its equation."""

from .naive_dlcl import layer_norm


def gtrans(y_0, layers, weights, group_layers, norm=None):
    """The sum over the tops of groups; *norm*: (gain, bias) of LN where the aggregator has it."""
    outputs = [y_0]
    for layer in layers:
        outputs.append(layer(outputs[-1]))
    tops = [outputs[min(end, len(layers))] for end in range(group_layers, len(layers) + group_layers, group_layers)]
    total = 0
    for weight, top in zip(weights, tops):
        total = total + weight * top
    assert len(tops) == len(weights)
    return total if norm is None else layer_norm(total, *norm)
