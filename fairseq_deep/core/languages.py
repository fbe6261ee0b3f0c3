"""Language-aware parts of multilingual models: LaLT (``--language-transform``) and LaLN (``--language-norm``).

Improving Massively Multilingual Neural Machine Translation and Zero-Shot Translation, Zhang et al., ACL 2020. With t
the target language:

    LaLN    LN_t(x) = (x - mean(x)) / sqrt(var(x) + eps) * g_t + b_t     each LayerNorm of layers and stacks
    LaLT    H~ = H W_t                                                   H: the encoder's output, C features

A source begins with the tag of its target language, ``<2de>``. Languages have indices from 1 in the order of their tags
in the source dictionary. Index 0 is for sources without a tag.

Names here: ``weight`` of :class:`LanguageTransform` has the W_t, which start as the identity (our choice). LaLN is
:class:`~fairseq_deep.core.norms.LanguageNorm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import UsageError
from .stack import Stack

SWITCHES = ("language_transform", "language_norm")
"""The flags that require language tags."""

STATE = "languages"
"""The entry of an incremental state with the languages of the hypotheses."""


def chosen_flag(flags: Any) -> str | None:
    """Return the first flag of *flags*, or of a stack, that requires language tags, or None."""
    return next((f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(flags, name, None)), None)


def check_languages(stack: Stack) -> None:
    """Reject a number of languages that contradicts the other flags.

    Raises:
        UsageError: one line that names the flags and the fix
    """
    flag = chosen_flag(stack)
    if flag is None:
        if stack.languages:
            raise UsageError(
                "--num-languages has no effect without --language-transform or --language-norm: add one, or omit it"
            )
        return
    if stack.languages < 1:
        raise UsageError(f"{flag} requires --num-languages of at least 1, not {stack.languages}: change it")


def first_tokens(tokens: Tensor, padding: Tensor) -> Tensor:
    """Return the first token of each source, B x 1, which is not padding; *tokens*, *padding*: B x T."""
    return tokens.gather(1, padding.int().argmin(1, keepdim=True))


def of_hypotheses(languages: Tensor, count: int) -> Tensor:
    """Repeat *languages*, one index per source, for *count* hypotheses; the hypotheses of a source are consecutive."""
    sources = languages.size(0)
    return languages.unsqueeze(1).expand(sources, count // sources).flatten()


def languages_of(sources: Tensor, count: int, state: dict | None) -> Tensor:
    """Return the languages of *count* hypotheses.

    The first decoding step stores them in *state*, because a search continues with fewer sentences than *sources*.
    """
    if state is None:
        return of_hypotheses(sources, count)
    if STATE not in state:
        state[STATE] = {STATE: of_hypotheses(sources, count)}
    return state[STATE][STATE]


def reorder_languages(state: dict, order: Tensor) -> None:
    """Continue with the hypotheses *order*."""
    if STATE in state:
        state[STATE] = {STATE: state[STATE][STATE].index_select(0, order)}


class LanguageIndex(nn.Module):
    """Maps sources to the indices of their target languages.

    Args:
        languages: number of languages

    Attributes:
        tags: index of the tag of each language in the source dictionary; -1 until :meth:`set_tags`
    """

    def __init__(self, languages: int):
        super().__init__()
        self.register_buffer("tags", torch.full((languages,), -1))

    def set_tags(self, tags: Iterable[int]) -> None:
        """Store the tag of each language."""
        self.tags.copy_(torch.tensor(list(tags)))

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the language index of each source, B: from 1 in the order of the tags, 0 without a tag.

        Args:
            tokens: B x T
            padding: true at the padding of *tokens*
        """
        first = first_tokens(tokens, padding)
        numbers = torch.arange(1, len(self.tags) + 1, device=tokens.device)
        return (first.eq(self.tags) * numbers).sum(1)


class LanguageTransform(nn.Module):
    """H W_t, with the matrix W_t of the target language (LaLT).

    Args:
        languages: number of languages; one more matrix is for sentences without a tag
        dim: C
    """

    def __init__(self, languages: int, dim: int):
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.eye(dim).repeat(languages + 1, 1, 1))

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        """Transform x (T x B x C); *languages*: indices of the languages, B."""
        weight = F.embedding(languages, self.weight.flatten(1)).view(-1, self.dim, self.dim)
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()

    def extra_repr(self) -> str:
        return f"{len(self.weight)} x {self.dim} x {self.dim}"
