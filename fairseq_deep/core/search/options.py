"""Options of the search for translations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fairseq_deep.core.fields import Range, check_fields
from fairseq_deep.core.registry import UsageError

RULES = {
    "beam": Range(1),
    "sampling_topp": Range(-math.inf, 1),
    **{name: Range(0) for name in ("min_len", "max_len_a", "max_len_b", "no_repeat_ngram_size")},
}
"""Ranges of :class:`SearchOptions`."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of :class:`BeamSearch`, by the names of fairseq-generate's flags.

    Attributes:
        beam: hypotheses per sentence; 1 is greedy search
        max_len_a, max_len_b: maximum number of tokens, a S + b, with S the length of the batch, including padding
        limit_each: S is the length of each sentence, so its hypotheses do not depend on the other sentences
        min_len: minimum number of tokens
        lenpen: scores are divided by the length to the power of this; above 1 favours long hypotheses
        unnormalized: do not divide scores
        gnmt_lenpen: divide by ((5 + length) / 6)^lenpen (Wu et al., 2016, Eq. 14, without coverage)
        unkpen: subtracted from the score of the unknown token
        temperature: divides the scores of tokens before the softmax
        no_repeat_ngram_size: size of n-grams that must not occur twice per hypothesis; 0: no limit
        sampling: sample each token instead of choosing the best
        sampling_topk: sample from the k most probable tokens; 0 or less: from all
        sampling_topp: sample from the fewest tokens with at least this total probability; 0 or less: from all
        match_source_len: hypotheses are at most as long as their source

    Raises:
        UsageError: a value has a wrong type or is out of range
    """

    beam: int = 5
    max_len_a: float = 0.0
    max_len_b: int = 200
    min_len: int = 1
    lenpen: float = 1.0
    unnormalized: bool = False
    gnmt_lenpen: bool = False
    unkpen: float = 0.0
    temperature: float = 1.0
    no_repeat_ngram_size: int = 0
    sampling: bool = False
    sampling_topk: int = -1
    sampling_topp: float = -1.0
    match_source_len: bool = False
    limit_each: bool = False

    def __post_init__(self):
        check_fields(vars(self), SearchOptions, RULES)
        if self.temperature <= 0:
            raise UsageError(f"temperature must be above 0 ({self.temperature}): change it")
        if self.gnmt_lenpen and self.unnormalized:
            raise UsageError("gnmt_lenpen divides scores, and unnormalized does not; omit one of them")

    @property
    def penalty(self) -> float | None:
        """Exponent of the length penalty; None if scores are not divided by a power of the length."""
        return None if self.unnormalized or self.gnmt_lenpen else self.lenpen
