"""Dynamic layer aggregation (Dou et al., 2019): dynamic and EM routing at one position, one number after the other.

Parameters are given by the names of the equations, as matrices that stand on the left of column vectors.
"""

import math

import torch

from .naive_dlcl import layer_norm


def votes_of_layer(y, part):
    """W (y + FFN(y)) for the vector *y* (C); *part*: {"LN": (gain, bias) or None, "W_1", "b_1", "W_2", "b_2", "W"}."""
    if part["LN"] is not None:
        y = layer_norm(y, *part["LN"])
    inner = part["W_1"] @ y + part["b_1"]
    u = y + part["W_2"] @ (inner * (inner > 0)) + part["b_2"]
    return part["W"] @ u


def softmax(logits):
    total = sum(torch.exp(logit) for logit in logits)
    return [torch.exp(logit) / total for logit in logits]


def squash(s, eps=1e-8):
    square = (s * s).sum()
    return square / (1 + square) * s / (square + eps) ** 0.5


def dynamic_routing(votes, iterations):
    """Output capsules for the votes v_ln = votes[l][n], and the shares c_l that they were made with."""
    capsules = range(len(votes[0]))
    b = [[0.0 * vote.sum() for vote in v] for v in votes]
    for _ in range(iterations):
        c = [softmax(logits) for logits in b]
        out = [squash(sum(share[n] * v[n] for share, v in zip(c, votes))) for n in capsules]
        b = [[logits[n] + (out[n] * v[n]).sum() for n in capsules] for logits, v in zip(b, votes)]
    return out, c


def em_routing(votes, iterations, beta_u, beta_a):
    """Output capsules a_n mu_n for the votes v_ln = votes[l][n], and the shares r_l that they were made with."""
    capsules = range(len(votes[0]))
    r = [[votes[0][0].new_tensor(1 / len(capsules)) for _ in capsules] for _ in votes]
    for left in reversed(range(iterations)):
        found = [m_step([v[n] for v in votes], [share[n] for share in r], beta_u[n], beta_a[n]) for n in capsules]
        if left:
            r = [softmax([torch.log(a) + log_normal(x, mu, var) for x, (mu, var, a) in zip(v, found)]) for v in votes]
    return [a * mu for mu, _, a in found], r


def m_step(votes, r, beta_u, beta_a, eps=1e-8):
    """Mean, variance with eps and activation of one capsule, for its vote and share of each layer."""
    total = sum(r)
    mu = sum(share * vote for share, vote in zip(r, votes)) / total
    var = sum(share * (vote - mu) ** 2 for share, vote in zip(r, votes)) / total + eps
    cost = (beta_u + torch.log(var**0.5)).sum() * total
    return mu, var, 1 / (1 + torch.exp(-(beta_a - cost)))


def log_normal(x, mean, variance):
    """Log density of a normal distribution with independent entries."""
    density = torch.exp(-((x - mean) ** 2) / (2 * variance)) / (2 * math.pi * variance) ** 0.5
    return torch.log(density).sum()


def aggregate(outputs, parts, kind, capsules, iterations, norm, betas=()):
    """H (T x B x C) after its norm, for the outputs y_1 ... y_L (each T x B x C) and the parameters of each layer."""
    time, batch, dim = outputs[0].shape
    rows = []
    for t in range(time):
        row = []
        for b in range(batch):
            votes = [votes_of_layer(y[t, b], part).split(dim // capsules) for y, part in zip(outputs, parts)]
            route = dynamic_routing if kind == "dynamic" else em_routing
            row.append(layer_norm(torch.cat(route(votes, iterations, *betas)[0]), *norm, eps=1e-12))
        rows.append(torch.stack(row))
    return torch.stack(rows)
