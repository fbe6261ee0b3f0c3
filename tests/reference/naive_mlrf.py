"""Multi-layer representation fusion (Wang et al., 2018): one layer after the other."""

import torch

from .naive_parts import feed_forward, norm, softmax


def learned(y, fusion, normalise):
    w = softmax(list(fusion.weight)) if normalise else list(fusion.weight)
    return sum(w[layer] * y[layer] for layer in range(len(y)))


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
    elif kind == "ffn":
        g = feed_forward(torch.cat(y, dim=-1), aggregator.fusion)
    else:
        g = sum(y) / len(y) if kind == "mean" else multi_hop(y, aggregator.fusion)
    return norm(aggregator.final_norm)(g)
