"""Dynamic aggregation of layers with routing by agreement.

Dynamic Layer Aggregation for Neural Machine Translation with Routing-by-Agreement, Dou et al., AAAI 2019.

At the top of a stack, separately at each position, H = [O_1; ..; O_N] replaces the output y_L of the last layer. Layer
l casts a vote v_ln for each of the N output capsules O_n, and an iteration determines the share of each vote:

    u_l = G_l(y_l),  v_ln = W_ln u_l in R^{C/N}

    dynamic routing (Sabour et al., 2017): b = 0, then T times
        c_l = softmax_n(b_l),  O_n = squash(sum_l c_ln v_ln),  b_ln += O_n . v_ln
        squash(s) = |s|^2 / (1 + |s|^2)  s / |s|

    EM routing (Hinton et al., 2018): r = 1/N, then T times
        M-step: mu_n, sig_n^2 = r-weighted mean and variance of v_ln over l
                cost_n = sum_dims (beta_u + log sig_n) sum_l r_ln,  a_n = sigmoid(beta_a - cost_n)
        E-step: r_ln = softmax_n(log a_n + log N(v_ln; mu_n, sig_n^2))
        O_n = a_n mu_n

This is an approximation of the paper: the iterations follow the literature on capsules, and we choose the rest, which
does not reproduce the printed parameter counts. G_l(y) = y + FFN_l(y), with an inner width of 4 C, reads its own layer,
whereas the paper's map reads all layers. beta_u and beta_a are learned for each capsule and start at 0; the argument of
the sigmoid has no other scale. A pre-norm stack normalises y_l first, like DLCL. H ends in a layer norm in both norm
placements, which replaces a pre-norm stack's final norm.

Names here: ``maps[l - 1]`` is G_l and W_l, ``routing.beta_u`` and ``beta_a`` belong to EM routing.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_deep.core.dropout import dropout_of
from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack
from fairseq_deep.core.xavier import fill_xavier

from .base import AGGREGATORS, LayerOutputs


class Votes(nn.Module):
    """Votes of one layer: W (y + FFN(y)).

    Args:
        dim: width C
        hidden: inner width of the FFN
        normalise: normalise y first
        dropout: dropout on the output of the FFN
        activation_dropout: dropout on its inner layer
    """

    def __init__(self, dim: int, hidden: int, normalise: bool, dropout: float, activation_dropout: float):
        super().__init__()
        self.layer_norm = nn.LayerNorm(dim) if normalise else None
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.vote = nn.Linear(dim, dim, bias=False)
        self.dropout = dropout_of(self, dropout)
        self.activation_dropout = dropout_of(self, activation_dropout)
        fill_xavier(self.fc1, self.fc2, self.vote)

    def forward(self, y: Tensor) -> Tensor:
        """Return v_l1 ... v_lN, concatenated (T x B x C), for *y* (T x B x C)."""
        if self.layer_norm is not None:
            y = self.layer_norm(y)
        hidden = self.activation_dropout(F.relu(self.fc1(y)))
        return self.vote(y + self.dropout(self.fc2(hidden)))


class DynamicRouting(nn.Module):
    """Dynamic routing.

    Args:
        capsules: number N of capsules
        iterations: T

    Shapes:
        votes: L x ... x N x C/N; logits b and shares c: L x ... x N; capsules O: ... x N x C/N
    """

    def __init__(self, capsules: int, iterations: int):
        super().__init__()
        self.iterations = iterations

    def squash(self, x: Tensor) -> Tensor:
        square = x.square().sum(dim=-1, keepdim=True)
        return square / (1.0 + square) * x / torch.sqrt(square + 1e-8)

    def step(self, votes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return capsules O and shares c for the *logits* b."""
        shares = torch.softmax(logits, dim=-1)
        return self.squash((shares.unsqueeze(-1) * votes).sum(dim=0)), shares

    def forward(self, votes: Tensor) -> Tensor:
        logits = torch.zeros_like(votes[..., 0])
        capsules = self.step(votes, logits)[0]
        for _ in range(self.iterations - 1):
            logits = logits + (capsules * votes).sum(dim=-1)
            capsules = self.step(votes, logits)[0]
        return capsules


class EmRouting(nn.Module):
    """EM routing, with shares r as logarithms throughout.

    Args:
        capsules: number N of capsules
        iterations: T

    Shapes:
        votes: L x ... x N x C/N; shares r: L x ... x N; means, variances: ... x N x C/N; activations a: ... x N
    """

    def __init__(self, capsules: int, iterations: int):
        super().__init__()
        self.iterations = iterations
        self.beta_u = nn.Parameter(torch.zeros(capsules))
        self.beta_a = nn.Parameter(torch.zeros(capsules))

    def m_step(self, votes: Tensor, log_shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and log a of each capsule."""
        # r / sum_l r as a softmax, which is defined even if r is 0 for all layers
        weights = torch.softmax(log_shares, dim=0).unsqueeze(-1)
        mean = (weights * votes).sum(dim=0)
        variance = (weights * (votes - mean).square()).sum(dim=0)
        log_deviation = 0.5 * torch.log(variance + 1e-8)
        cost = (self.beta_u.to(votes.dtype).unsqueeze(-1) + log_deviation).sum(dim=-1) * log_shares.exp().sum(dim=0)
        return mean, variance, F.logsigmoid(self.beta_a.to(votes.dtype) - cost)

    def e_step(self, votes: Tensor, mean: Tensor, variance: Tensor, log_active: Tensor) -> Tensor:
        """Return log r."""
        variance = variance + 1e-8
        density = -0.5 * ((votes - mean).square() / variance + torch.log(2.0 * math.pi * variance)).sum(dim=-1)
        return torch.log_softmax(log_active + density, dim=-1)

    def forward(self, votes: Tensor) -> Tensor:
        log_shares = torch.full_like(votes[..., 0], -math.log(float(votes.size(-2))))
        mean, variance, log_active = self.m_step(votes, log_shares)
        for _ in range(self.iterations - 1):
            log_shares = self.e_step(votes, mean, variance, log_active)
            mean, variance, log_active = self.m_step(votes, log_shares)
        return log_active.exp().unsqueeze(-1) * mean


ROUTINGS = {"dynamic": DynamicRouting, "em": EmRouting}


@AGGREGATORS.register("routing")
class Routing(LayerOutputs):
    """Aggregation of a stack's layers by routing.

    Args:
        stack: see :class:`Aggregator`; its dropouts act in the FFN of each map
        kind: "em" or "dynamic"
        iterations: T
        capsules: N, which divides the width; default: the width, that is capsules of size 1
        hidden: inner width of the FFN in each map; default 4 C

    Routing computes in fp32. In training, the backward pass recomputes its iterations, which would otherwise save
    several tensors of L x T x B x C each. With recomputation, it recomputes the whole aggregation.

    Raises:
        UsageError: a value is unknown or out of range, N does not divide the width, or the stack has no layer
    """

    paper = "Dou 2019"
    architectures = {
        "routing_6l": ("post", (6, 6), {}),
        "routing_dynamic_6l": ("post", (6, 6), {"routing_kind": "dynamic"}),
    }
    needs_layers = ("encoder", "decoder")
    decoder_flags = ("no_decoder_final_norm",)
    options = {
        "kind": Option("kind of routing", [*ROUTINGS]),
        "iterations": Option("number of iterations", Range(1)),
        "capsules": Option("number of output capsules, a divisor of the width (default: the width)", Range(1)),
        "hidden": Option("inner width of each layer's map (default: 4 x width)", Range(1)),
    }

    def __init__(
        self,
        stack: Stack,
        kind: str = "em",
        iterations: int = 3,
        capsules: int | None = None,
        hidden: int | None = None,
    ):
        super().__init__(stack)
        if capsules is not None and self.dim % capsules:
            raise UsageError(
                f"--routing-capsules {capsules} does not divide the width {self.dim} of the {stack.side}: "
                "use a divisor, or omit it for capsules of size 1"
            )
        self.recompute = stack.recompute
        self.capsules = capsules or self.dim
        dropouts = (stack.dropout, stack.activation_dropout)
        self.maps = nn.ModuleList(
            Votes(self.dim, hidden or 4 * self.dim, self.pre_norm, *dropouts) for _ in range(self.num_layers)
        )
        self.routing = ROUTINGS[kind](self.capsules, iterations)
        # many capsules make H small (in dynamic routing about 1/N^2): the usual 1e-5 would exceed its variance
        self.layer_norm = nn.LayerNorm(self.dim, eps=1e-12)

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        return Layout(final_norm=False)

    def matrices(self) -> list[Tensor]:
        return [linear.weight for part in self.maps for linear in (part.fc1, part.fc2, part.vote)]

    def compiled(self) -> list[nn.Module]:
        return [*self.maps, self.routing]

    def finish(self, state: list[Tensor]) -> Tensor:
        if self.training and self.recompute:
            return checkpoint(self._aggregate, state, use_reentrant=False)
        return self._aggregate(state)

    def _aggregate(self, state: list[Tensor]) -> Tensor:
        votes = widened(torch.stack([part(output) for part, output in zip(self.maps, state)]))
        votes = votes.view(votes.size(0), votes.size(1), votes.size(2), self.capsules, -1)
        if self.training and not self.recompute:
            x = self._recomputed_routing(votes)
        else:
            x = self.routing(votes)
        x = x.flatten(-2)
        norm = self.layer_norm
        x = F.layer_norm(x, [self.dim], norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
        return x.to(state[-1].dtype)

    def _recomputed_routing(self, votes: Tensor) -> Tensor:
        return checkpoint(self.routing, votes, use_reentrant=False, preserve_rng_state=False)
