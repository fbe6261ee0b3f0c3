"""Hyper-Connections: n residual streams, which each sub-layer reads and writes with its own weights.

Hyper-Connections, Zhu et al., 2024 (arXiv 2409.19606). H has n rows (streams) of width C and starts as n copies of the
embedding output. With F_l the sub-layers (with a norm of their input, without residual connection), N in a stack:

    h_l = a_l^T H            input of sub-layer l; a_l in R^n
    H   = A_l^T H + b_l F_l(h_l)^T                  A_l in R^{n x n}, b_l in R^n
    output = mean of the rows of H

Static weights are parameters. Dynamic weights also depend on the input, with one LN, W_a, W_A and W_b per sub-layer:

    a = a_l + s_a tanh(LN(H) W_a),   A = A_l + s_a tanh(LN(H) W_A),   b = b_l + s_b tanh(LN(H) W_b)

They start as a_l = e_{l mod n}, A_l = I, b_l = 1, s = 0.01 and W = 0, so each stream is the plain pre-norm stream.
The paper's output is the sum. Norms remove the factor n, and the mean fits into fp16 where the sum does not. Without a
final norm, the output of dynamic and static weights is the sum, as in version 0.3.

mHC: Manifold-Constrained Hyper-Connections, Xie et al., 2025 (arXiv 2512.24880), ``kind="manifold"``. With v the rows
of H in one vector, A is doubly stochastic, so a product of many A neither grows nor vanishes:

    a = sigmoid(alpha_a RMSNorm(v) P_a + c_a),   b = 2 sigmoid(alpha_b RMSNorm(v) P_b + c_b)
    A^T = Sinkhorn(exp(alpha_A RMSNorm(v) P_A + c_A)),   20 times columns, then rows, divided by their sums

alpha starts at 0.01. Our choices: P starts at 0, c_a such that a sums to 1 and prefers stream l mod n, and c_A such
that A is near I. An untrained model of any kind then computes the plain pre-norm stack.

Names here: ``reads`` is [a_l, A_l]^T or its c, ``writes`` is b_l or its c, ``map`` is [W_a, W_A, W_b]^T or P^T,
``scales`` are s or alpha. Streams and weights are in fp32 if the model is in half precision.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_deep.core.compat import no_autocast
from fairseq_deep.core.fields import Option, Range
from fairseq_deep.core.keep_fp32 import widened
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Layout, Stack

from .base import AGGREGATORS, Aggregator

KINDS = ("dynamic", "static", "manifold")
SINKHORN_ITERATIONS = 20
PREFERENCE = 4.0
"""Manifold: initial logit of the preference of a sub-layer for one stream, and of a stream for itself."""
MOST = math.ceil(1 + math.exp(PREFERENCE))  # with more streams, the shares of the others exceed 1


def sinkhorn(logits: Tensor, iterations: int = SINKHORN_ITERATIONS) -> Tensor:
    """Return doubly stochastic matrices near exp(*logits*) (... x n x n); rows sum to 1 exactly."""
    for _ in range(iterations):
        logits = logits.log_softmax(-2).log_softmax(-1)  # each divides by sums, in one kernel
    return logits.exp()


class StaticWeights(nn.Module):
    """Weights of one sub-layer.

    Args:
        streams: n
        dim: width C
        number: index of the sub-layer, from 0

    Returns:
        for streams H (T x B x n x C): [a, A]^T ((T x B x) (1+n) x n) and b ((T x B x) n)
    """

    def __init__(self, streams: int, dim: int, number: int):
        super().__init__()
        first = F.one_hot(torch.tensor(number % streams), streams).float()
        self.reads = nn.Parameter(torch.cat([first.unsqueeze(0), torch.eye(streams)]))
        self.writes = nn.Parameter(torch.ones(streams))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        return self.reads.to(streams.dtype), self.writes.to(streams.dtype)


class DynamicWeights(StaticWeights):
    """Weights that also depend on the streams."""

    def __init__(self, streams: int, dim: int, number: int):
        super().__init__(streams, dim, number)
        self.norm = nn.LayerNorm(dim)
        self.map = nn.Parameter(torch.zeros(streams + 2, dim))
        self.scales = nn.Parameter(torch.full((2,), 0.01))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        dtype, norm = streams.dtype, self.norm
        normed = F.layer_norm(streams, norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps)
        moved, scales = F.linear(normed, self.map.to(dtype)).tanh(), self.scales.to(dtype)
        reads = self.reads.to(dtype) + scales[0] * moved[..., :-1].transpose(-1, -2)
        return reads, self.writes.to(dtype) + scales[1] * moved[..., -1]


class ManifoldWeights(nn.Module):
    """Constrained weights of one sub-layer; see :class:`StaticWeights`."""

    def __init__(self, streams: int, dim: int, number: int):
        super().__init__()
        other = 1 / (1 + math.exp(PREFERENCE))
        share = 1 - (streams - 1) * other
        # sigmoid(40) is 1: a single stream is read unchanged
        own = math.log(share / (1 - share)) if streams > 1 else 40.0
        first = torch.full((1, streams), -PREFERENCE)
        first[0, number % streams] = own
        self.reads = nn.Parameter(torch.cat([first, PREFERENCE * torch.eye(streams)]))
        self.writes = nn.Parameter(torch.zeros(streams))
        self.map = nn.Parameter(torch.zeros(streams * (streams + 2), streams * dim))
        self.scales = nn.Parameter(torch.full((3,), 0.01))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        count, dtype = streams.size(-2), streams.dtype
        flat = streams.flatten(-2)
        flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-6)
        moved = F.linear(flat, self.map.to(dtype)).unflatten(-1, (count + 2, count))
        scales, starts = self.scales.to(dtype), self.reads.to(dtype)
        pre = torch.sigmoid(scales[0] * moved[..., 0, :] + starts[0])
        mixed = sinkhorn(scales[2] * moved[..., 2:, :] + starts[1:])
        writes = 2 * torch.sigmoid(scales[1] * moved[..., 1, :] + self.writes.to(dtype))
        return torch.cat([pre.unsqueeze(-2), mixed], -2), writes


OF_KIND = {"dynamic": DynamicWeights, "static": StaticWeights, "manifold": ManifoldWeights}


@AGGREGATORS.register("hyper-connections")
class HyperConnections(Aggregator):
    """Hyper-Connections for one stack of N sub-layers without residual connections.

    The state is [h, A^T H, b]: the input of the next sub-layer, and the streams and weights for adding its output. The
    output of a layer is h, the input of the next layer; after the last layer, h is the output of the stack.

    Args:
        stack: see :class:`Aggregator`; its layers always normalise their input
        streams: n
        kind: "dynamic", "static" or "manifold" (mHC)

    Shapes:
        h: T x B x C; streams: T x B x n x C

    Raises:
        UsageError: no streams, or an unknown kind
    """

    paper = "Zhu 2024"
    architectures = {
        "hyper_connections_6l": ("-", (6, 6), {}),
        "mhc_6l": ("-", (6, 6), {"hyper_connections_kind": "manifold"}),
    }
    options = {"streams": Option("residual streams", Range(1)), "kind": Option("weights; manifold is mHC", KINDS)}
    unused_flags = {"{side}_normalize_before": (True, "always normalises the input of sub-layers: omit it")}

    def __init__(self, stack: Stack, streams: int = 4, kind: str = "dynamic"):
        super().__init__(stack)
        if kind == "manifold" and streams > MOST:
            raise UsageError(f"--hyper-connections-streams {streams} must be at most {MOST} with manifold: lower it")
        self.streams, self.kind = streams, kind
        self.sums = kind != "manifold" and not stack.final_norm
        self.mixers = nn.ModuleList(OF_KIND[kind](streams, self.dim, number) for number in range(self.num_layers))

    @classmethod
    def layout(cls, side: str, options: dict[str, Any]) -> Layout:
        return Layout(residual=False, split=True)

    def compiled(self) -> list[nn.Module]:
        return [] if self.kind == "static" else list(self.mixers)

    def record(self) -> dict[str, Tensor]:
        """Return the greatest gain of a stream through the parameters A_1 ... A_N, an absolute row sum."""
        if self.kind == "manifold":  # at most 1
            return {}
        gain = torch.eye(self.streams, device=self.mixers[0].reads.device)
        for mixer in self.mixers:
            gain = mixer.reads[1:].float() @ gain
        return {"gain": gain.abs().sum(1).max()}

    def start(self, x: Tensor) -> list[Tensor]:
        return self._read(widened(x).unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous(), 0, x.dtype)

    def write(self, state: list[Tensor], layer: int, output: Tensor) -> list[Tensor]:
        h, rest, weights = state
        streams = rest + weights.unsqueeze(-1) * output.to(rest.dtype).unsqueeze(2)
        if layer == self.num_layers - 1:
            output = streams.sum(2) if self.sums else streams.mean(2)
            return [output.to(h.dtype), rest, weights]
        return self._read(streams, layer + 1, h.dtype)

    def layer_output(self, state: list[Tensor], output: Tensor) -> Tensor:
        return state[0]

    def _read(self, streams: Tensor, layer: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the state before the sub-layer *layer*, which reads *streams*."""
        with no_autocast(streams):
            reads, writes = self.mixers[layer](streams)
            mixed = torch.matmul(reads, streams)
        return [mixed[:, :, 0].to(dtype), mixed[:, :, 1:], writes]
