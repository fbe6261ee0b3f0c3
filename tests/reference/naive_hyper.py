"""Hyper-Connections and mHC, position by position and stream by stream, from the equations."""

import torch

from .naive_parts import norm, rms_norm, sigmoid


def static(mixer, streams):
    """a, A (as A[i][j], from stream i to stream j) and b, of one position or for all."""
    count = len(streams)
    a = [mixer.reads[0, i] for i in range(count)]
    matrix = [[mixer.reads[1 + j, i] for j in range(count)] for i in range(count)]
    return a, matrix, [mixer.writes[j] for j in range(count)]


def dynamic(mixer, streams):
    a, matrix, b = static(mixer, streams)
    for i, stream in enumerate(streams):
        normed = norm(mixer.norm)(stream)
        moved = [torch.tanh((normed * row).sum(-1, keepdim=True)) for row in mixer.map]
        a[i] = a[i] + mixer.scales[0] * moved[0]
        matrix[i] = [value + mixer.scales[0] * moved[1 + j] for j, value in enumerate(matrix[i])]
        b[i] = b[i] + mixer.scales[1] * moved[-1]
    return a, matrix, b


def manifold(mixer, streams):
    count, flat = len(streams), rms_norm(torch.cat(streams, -1))

    def logit(row, scale, start):
        return mixer.scales[scale] * (flat * mixer.map[row]).sum(-1, keepdim=True) + start

    a = [sigmoid(logit(i, 0, mixer.reads[0, i])) for i in range(count)]
    b = [2 * sigmoid(logit(count + j, 1, mixer.writes[j])) for j in range(count)]
    m = [[torch.exp(logit(count * (2 + j) + i, 2, mixer.reads[1 + j, i])) for i in range(count)] for j in range(count)]
    for _ in range(20):
        sums = [sum(m[j][i] for j in range(count)) for i in range(count)]
        m = [[m[j][i] / sums[i] for i in range(count)] for j in range(count)]
        sums = [sum(m[j]) for j in range(count)]
        m = [[m[j][i] / sums[j] for i in range(count)] for j in range(count)]
    return a, [[m[j][i] for j in range(count)] for i in range(count)], b


WEIGHTS = {"static": static, "dynamic": dynamic, "manifold": manifold}


def hyper_connections(aggregator, outputs, kind="dynamic", streams=4):
    """The input of the next sub-layer, or the mean of the streams above the last."""
    count, values = streams, [outputs[0]] * streams
    for mixer, output in zip(aggregator.mixers, [*outputs[1:], None]):
        a, matrix, b = WEIGHTS[kind](mixer, values)
        if output is None:
            return sum(weight * stream for weight, stream in zip(a, values))
        values = [sum(matrix[i][j] * values[i] for i in range(count)) + b[j] * output for j in range(count)]
    return sum(values) / count
