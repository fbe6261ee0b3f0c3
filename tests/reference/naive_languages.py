"""Language-aware transformation and normalisation of one vector after the other, from the equations (Zhang, 2020)."""

import torch


def language_of(source, tags, pad):
    """The number of the target language: that of the tag that a source (T, padded) begins with, from 1; 0 for none."""
    first = [word for word in source.tolist() if word != pad][0]
    return tags.index(first) + 1 if first in tags else 0


def layer_norm(x, gains, biases, languages, eps=1e-5):
    """LN(x) with the gain and the bias of each sentence's language (T x B x C)."""
    rows = []
    for i in range(x.size(0)):
        for b, language in enumerate(languages):
            vector = x[i, b]
            mean = sum(vector) / len(vector)
            variance = sum((value - mean) ** 2 for value in vector) / len(vector)
            scaled = [(value - mean) / (variance + eps).sqrt() for value in vector]
            rows.append(torch.stack([v * gains[language][j] + biases[language][j] for j, v in enumerate(scaled)]))
    return torch.stack(rows).view_as(x)


def transform(x, matrices, languages):
    """H W_t: each row of features times the matrix of its sentence's language (T x B x C)."""
    columns = range(x.size(-1))
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack([sum(x[i, b, k] * matrices[language][k, j] for k in columns) for j in columns])
                    for b, language in enumerate(languages)
                ]
            )
            for i in range(x.size(0))
        ]
    )
