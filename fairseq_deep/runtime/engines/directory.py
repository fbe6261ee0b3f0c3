"""The common part of engines for directories of other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions

from ..bundle import Bundle
from ..loading import ModelFacts, languages_of
from .torch_engine import Hypotheses


class DirectoryEngine:
    """Engine that searches with another program.

    Args:
        bundle: the directory
        sides: source and target dictionary
        options: search options
        device: device of the model
    """

    name: str
    models: Sequence[Any] = ()

    def __init__(self, bundle: Bundle, sides: Iterable[Any], options: SearchOptions, device: str = "cpu"):
        facts = bundle.record["facts"]
        self.facts = ModelFacts(**{**facts, "layers": tuple(facts["layers"])})
        self.languages = tuple(languages_of(bundle, bundle.record["task"]))
        self.options, self.device = options, torch.device(device)
        self.source, self.target = sides

    def translate(self, batches: Iterable[Sequence[Tensor]], nbest: int = 1) -> Iterator[Hypotheses]:
        """See :class:`TorchEngine`; all batches are started before the first result is read."""
        for parts in [self._start(sentences, min(nbest, self.options.beam)) for sentences in batches]:
            found = {}
            for numbers, results in parts:
                found.update(zip(numbers, results()))
            yield [found[number] for number in range(len(found))]

    def _start(self, sentences: Sequence[Tensor], nbest: int) -> list[tuple[list[int], Callable[[], Hypotheses]]]:
        """Start the search of *sentences*, and return numbers and results of those with the same length limit."""
        longest = max(map(len, sentences))
        groups: dict[int, list[int]] = {}
        for number, tokens in enumerate(sentences):
            length = len(tokens) if self.options.limit_each else longest
            limit = min(int(self.options.max_len_a * length + self.options.max_len_b), self.facts.max_target - 1)
            groups.setdefault(limit, []).append(number)
        return [
            (numbers, self.start([sentences[number] for number in numbers], limit, nbest))
            for limit, numbers in groups.items()
        ]

    def start(self, sentences: Sequence[Tensor], limit: int, nbest: int) -> Callable[[], Hypotheses]:
        """Return a function that returns *nbest* hypotheses of each sentence.

        Args:
            limit: maximum number of target tokens, without end-of-sentence
        """
        raise NotImplementedError
