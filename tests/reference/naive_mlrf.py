"""Multi-layer representation fusion (Wang et al., 2018): one layer after the other."""

import torch

from tests.helpers.equations import norm

from .naive_dropout import dropped
from .naive_routing import softmax


def learned(y, fusion, normalise):
    w = softmax(list(fusion.weight)) if normalise else list(fusion.weight)
    return sum(w[layer] * y[layer] for layer in range(len(y)))


def ffn(y, fusion):
    inner = torch.cat(y, dim=-1) @ fusion.fc1.weight.T + fusion.fc1.bias
    return dropped(inner * (inner > 0), "activation_dropout") @ fusion.fc2.weight.T + fusion.fc2.bias


def multi_hop(y, fusion):
    scores = [torch.tanh(row @ fusion.hidden.weight.T) @ fusion.hops.weight.T for row in y]
    hops = []
    for hop in range(scores[0].size(-1)):
        shares = softmax([score[..., hop : hop + 1] for score in scores])
        hops.append(sum(shares[layer] * y[layer] for layer in range(len(y))))
    return torch.cat(hops, dim=-1) @ fusion.out.weight.T


def fuse(aggregator, outputs, kind="learned", weights="softmax", **_):
    """g (T x B x C) of the outputs y_1 ... y_L, each after its norm in pre-norm; in post-norm, g has one."""
    y = [norm(each)(output) for each, output in zip(aggregator.layer_norms, outputs)] or outputs
    if kind == "learned":
        g = learned(y, aggregator.fusion, weights == "softmax")
    else:
        g = sum(y) / len(y) if kind == "mean" else {"ffn": ffn, "multi-hop": multi_hop}[kind](y, aggregator.fusion)
    return norm(aggregator.final_norm)(g)
