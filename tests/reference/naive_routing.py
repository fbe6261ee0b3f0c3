"""Dynamic layer aggregation (Dou et al., 2019): dynamic and EM routing, one capsule after the other."""

import math

import torch

from .naive_parts import dropped, feed_forward, layer_norm, norm, sigmoid, softmax


def votes_of_layer(y, part):
    """W (y + FFN(y)) for *y* (T x B x C)."""
    y = norm(part.layer_norm)(y)
    return (y + dropped(feed_forward(y, part))) @ part.vote.weight.T


def squash(s, eps=1e-8):
    square = (s * s).sum(-1, keepdim=True)
    return square / (1 + square) * s / (square + eps) ** 0.5


def dynamic_routing(votes, iterations):
    """Output capsules for the votes v_ln = votes[l][n]."""
    capsules = range(len(votes[0]))
    b = [[torch.zeros_like(vote[..., :1]) for vote in v] for v in votes]
    for _ in range(iterations):
        c = [softmax(logits) for logits in b]
        out = [squash(sum(share[n] * v[n] for share, v in zip(c, votes))) for n in capsules]
        b = [[logits[n] + (out[n] * v[n]).sum(-1, keepdim=True) for n in capsules] for logits, v in zip(b, votes)]
    return out


def em_routing(votes, iterations, beta_u, beta_a):
    """Output capsules a_n mu_n for the votes v_ln = votes[l][n]."""
    capsules = range(len(votes[0]))
    r = [[votes[0][0].new_tensor(1 / len(capsules)) for _ in capsules] for _ in votes]
    for left in reversed(range(iterations)):
        found = [m_step([v[n] for v in votes], [share[n] for share in r], beta_u[n], beta_a[n]) for n in capsules]
        if left:
            r = [softmax([torch.log(a) + log_normal(x, mu, var) for x, (mu, var, a) in zip(v, found)]) for v in votes]
    return [a * mu for mu, _, a in found]


def m_step(votes, r, beta_u, beta_a, eps=1e-8):
    """Mean, variance with eps and activation of one capsule, for its vote and share of each layer."""
    total = sum(r)
    mu = sum(share * vote for share, vote in zip(r, votes)) / total
    var = sum(share * (vote - mu) ** 2 for share, vote in zip(r, votes)) / total + eps
    cost = (beta_u + torch.log(var**0.5)).sum(-1, keepdim=True) * total
    return mu, var, sigmoid(beta_a - cost)


def log_normal(x, mean, variance):
    """Log density of a normal distribution with independent entries."""
    density = torch.exp(-((x - mean) ** 2) / (2 * variance)) / (2 * math.pi * variance) ** 0.5
    return torch.log(density).sum(-1, keepdim=True)


def aggregate(aggregator, outputs, kind="em", iterations=3, capsules=None, **_):
    """H (T x B x C) after its norm, for the outputs y_1 ... y_L (each T x B x C)."""
    size = outputs[0].size(-1) // (capsules or outputs[0].size(-1))
    votes = [votes_of_layer(y, part).split(size, dim=-1) for y, part in zip(outputs, aggregator.maps)]
    if kind == "dynamic":
        found = dynamic_routing(votes, iterations)
    else:
        found = em_routing(votes, iterations, aggregator.routing.beta_u, aggregator.routing.beta_a)
    return layer_norm(torch.cat(found, dim=-1), *aggregator.layer_norm.parameters(), eps=1e-12)
