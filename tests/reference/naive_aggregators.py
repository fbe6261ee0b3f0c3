"""The equations of all aggregators but depth-wise LSTMs and MSC, with the parameters of a module of ours.

Each is a function of the aggregator and of the outputs y_0 ... y_l so far, every sum written out. It gives x_{l+1}, the
input of the next layer or, above the last layer, the output.
"""

import functools

import torch

from .naive_hyper import hyper_connections
from .naive_mlrf import fuse
from .naive_ode import step
from .naive_parts import dropped, feed_forward, gelu, layer_norm, norm, rms_norm
from .naive_routing import aggregate as route

PLAIN_DECODERS = ("gtrans", "mlrf")
NAMES = ("attention-residual", "dlcl", "gtrans", "hierarchical", "hyper-connections", "iterative", "linear", "lstm",
         "mlrf", "msc", "mudd", "ode", "residual", "residual-dual", "rnn", "routing")  # fmt: skip
"""The methods of :func:`path` and ``naive_model``; others have their equations in their test files."""


def path(name, aggregator, y_0, layers, side="encoder", history="residual", **options):
    """x_1, the input of the first layer, to x_{L+1}, the output; *layers*: functions."""
    if name == "ode":
        if side == "encoder":
            layers = [functools.partial(step, aggregator, layer, **options) for layer in layers]
        name, aggregator, options = history, aggregator.inner, {}
    name = "residual" if side == "decoder" and name in PLAIN_DECODERS else name
    outputs, inputs = [y_0], []
    for layer in layers:
        inputs.append(NAIVE[name](aggregator, outputs, **options))
        outputs.append(layer(inputs[-1]))
    return [*inputs, NAIVE[name](aggregator, outputs, **options)]


def plain(aggregator, outputs, **_):
    return outputs[-1]


def top(function):
    """A plain stack, above which *function* makes the output of y_1 ... y_L."""

    def read(aggregator, outputs, **options):
        ends = len(outputs) > aggregator.num_layers
        return function(aggregator, outputs[1:], **options) if ends else outputs[-1]

    return read


def combine(outputs, weight, norms, pre_norm, window=None, normalize=False):
    """G(y_0, ..., y_l) of DLCL (Wang et al., 2019, Eq. 7 to 9) for the list *outputs* of y_k.

    weight: (L+1) x (L+1) x n; norms: the functions LN_0 ... LN_L, on y_k or, in post-norm, on the combination of row k
    """
    last = len(outputs) - 1
    allowed = [k for k in range(last + 1) if window is None or k > last - window]
    scores = torch.stack([weight[last, k] for k in allowed])
    if normalize:
        scores = scores.exp() / scores.exp().sum(0)
    total = 0
    for score, k in zip(scores, allowed):
        entry = norms[k](outputs[k]) if pre_norm else outputs[k]
        total = total + entry * score.repeat(entry.size(-1) // score.numel())
    return total if pre_norm else norms[last](total)


def dlcl(aggregator, outputs, window=None, normalize=False, dropout=0.0, **_):
    size = aggregator.num_layers + 1
    norms = list(map(norm, [aggregator.first_norm, *(aggregator.layer_norms or [None] * size)]))
    weight = aggregator.weight.view(size, size, -1)
    return (1 + dropout) * combine(outputs, weight, norms, aggregator.pre_norm, window, normalize)


def aggregate(inputs, node):
    """AGG(u_1, ..., u_n) of the list *inputs* (Dou et al., 2018)."""
    return norm(node.layer_norm)(dropped(feed_forward(torch.cat(inputs, dim=-1), node)) + sum(inputs))


def hierarchical(aggregator, outputs, block=2):
    """o_i merges the *block* layers above o_{i-1} (fewer at the top) and o_{i-1}, and is what layers go on with."""
    if (len(outputs) - 1) % block and len(outputs) <= aggregator.num_layers:
        return outputs[-1]
    below = []
    for i, first in enumerate(range(1, len(outputs), block)):
        below = [aggregate([*outputs[first : first + block], *below], aggregator.nodes[i])]
    return below[0] if below else outputs[0]


def iterative(aggregator, outputs):
    """o_l merges y_l and o_{l-1}."""
    o = outputs[0]
    for output, node in zip(outputs[1:], aggregator.nodes):
        o = aggregate([output, o], node)
    return o


def linear(aggregator, outputs):
    """Each layer's output is multiplied by a matrix of its own."""
    matrices = aggregator.matrix.split(outputs[0].size(-1), dim=1)
    return sum(output @ matrix.T for output, matrix in zip(outputs, matrices, strict=True))


def gtrans(aggregator, outputs, group_layers=3):
    """The sum over the tops of groups."""
    depth = len(outputs)
    tops = [outputs[min(end, depth) - 1] for end in range(group_layers, depth + group_layers, group_layers)]
    total = sum(weight * top for weight, top in zip(aggregator.fusion.weight, tops, strict=True))
    return norm(aggregator.fusion_norm)(total)


def mudd(aggregator, outputs):
    """Dynamic DLCL (one-way MUDDFormer)."""
    if len(outputs) == 1:
        return outputs[0]
    newest, hidden, out = outputs[-1], aggregator.hidden[len(outputs) - 2], aggregator.out[len(outputs) - 2]
    weights = gelu(rms_norm(newest) @ hidden.weight.T) @ out.weight.T + out.bias
    return sum(weights[..., j : j + 1] * output for j, output in enumerate(outputs))


def residual_dual(aggregator, outputs):
    """Two streams: x, which each norm is on, and r, which has none."""
    x = r = outputs[0]
    for a, after in zip(outputs[1:], aggregator.norms):
        r, x = r + a, norm(after)(x + a)
    ends = len(outputs) > aggregator.num_layers
    return x + layer_norm(r, *aggregator.dual_norm.parameters(), eps=1e-7) if ends else x


def attention_residual(aggregator, outputs, block=1):
    """sum_i softmax_i(query . RMSNorm(v_i)) v_i over y_0 and the sums v_i of blocks."""
    if len(outputs) == 1:
        return outputs[0]
    query = aggregator.gain[len(outputs) - 2] * aggregator.query[len(outputs) - 2]
    sources = [outputs[0], *(sum(outputs[start : start + block]) for start in range(1, len(outputs), block))]
    scores = [rms_norm(v, query).sum(-1, keepdim=True).exp() for v in sources]
    return sum(score / sum(scores) * v for score, v in zip(scores, sources))


NAIVE = {
    "attention-residual": attention_residual,
    "dlcl": dlcl,
    "gtrans": top(gtrans),
    "hierarchical": hierarchical,
    "hyper-connections": hyper_connections,
    "iterative": top(iterative),
    "linear": top(linear),
    "mlrf": top(fuse),
    "mudd": mudd,
    "residual": plain,
    "residual-dual": residual_dual,
    "routing": top(route),
}
