"""Language-aware transformation and normalisation of one vector after the other, from the equations (Zhang, 2020)."""

import torch


def language_of(source, tags, pad):
    """The number of the target language: that of the tag that a source (T, padded) begins with, from 1; 0 for none."""
    first = [word for word in source.tolist() if word != pad][0]
    return tags.index(first) + 1 if first in tags else 0


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
