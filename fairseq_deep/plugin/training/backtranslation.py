"""RoBT: random online back-translation of multilingual models (``--task deep_translation --robt``).

Improving Massively Multilingual Neural Machine Translation and Zero-Shot Translation, Zhang et al., ACL 2020,
Algorithm 1. A batch has pairs (x, y) with target languages t. For each pair, with M the model:

    t' ~ uniform over the other languages
    x' = M(y, t')                        greedy, without gradients
    loss = -log p(y | x, t) - log p(y | x', t)

A source begins with the tag of its target language: M(y, t') reads ``<2t'> y``, and the second term reads ``<2t> x'``.

From the authors' code, not the paper: t' differs from t, and x' has at most as many tokens as the longest tagged y of
the batch. Our choice: sources that exceed the model's positions lose their last tokens.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import torch
from fairseq.data import data_utils
from torch import Tensor

from fairseq_deep.core.language_tags import tag_indices
from fairseq_deep.core.languages import first_tokens
from fairseq_deep.core.registry import UsageError

GREEDY = Namespace(beam=1, max_len_a=1, max_len_b=0)


class BackTranslator:
    """Replaces the source sentences of a batch with back-translations of its targets.

    Args:
        task: a translation task with one dictionary for both languages

    Raises:
        UsageError: the dictionaries differ or have fewer than two language tags, or the task loads alignments
    """

    def __init__(self, task: Any):
        dictionary = task.source_dictionary
        if dictionary.symbols != task.target_dictionary.symbols:
            raise UsageError("--robt requires one dictionary for both sides: binarise with --joined-dictionary")
        tags = tag_indices(dictionary.symbols)
        if len(tags) < 2:
            raise UsageError(
                f"--robt requires at least two language tags such as <2de> in the dictionary, not {len(tags)}: begin "
                "each source with the tag of its target language, and binarise again"
            )
        if task.cfg.load_alignments:
            raise UsageError("--robt is not supported with --load-alignments: omit one of them")
        self.task, self.pad, self.eos = task, dictionary.pad(), dictionary.eos()
        self.tags = torch.tensor(tags)
        self.generator: Any = None

    def __call__(self, model: Any, sample: dict[str, Any]) -> dict[str, Any]:
        """Return *sample* with back-translated sources; the choice of languages depends on seed, update and batch.

        Raises:
            UsageError: a source has no language tag
        """
        source, target = sample["net_input"]["src_tokens"], sample["target"]
        tags = self._tags_of(source, sample["id"])
        others = self._draw(tags, int(sample["id"].min()))
        model_itself = unwrapped(model)
        longest = model_itself.max_positions()[0]
        targets = [row[row.ne(self.pad)] for row in target]
        found = self._translate(model_itself, self._join(others, targets, longest))
        return {**sample, "net_input": {**sample["net_input"], **self._join(tags, found, longest)}}

    def _tags_of(self, source: Tensor, ids: Tensor) -> Tensor:
        """Return the first token of each source."""
        first = first_tokens(source, source.eq(self.pad)).squeeze(1)
        self.tags = self.tags.to(source.device)
        missing = ~torch.isin(first, self.tags)
        if missing.any():
            raise UsageError(
                f"--robt: the source of training pair {int(ids[missing].min())} (counted from 0) does not begin with a "
                "language tag such as <2de>: correct the text, and binarise again"
            )
        return first

    def _draw(self, tags: Tensor, batch: int) -> Tensor:
        """Return another tag for each of *tags*, uniform over the other languages."""
        own = tags.unsqueeze(1).eq(self.tags).int().argmax(1)
        with data_utils.numpy_seed(torch.initial_seed(), batch):  # fairseq seeds torch with --seed and the update
            steps = np.random.randint(1, len(self.tags), size=len(tags))
        return self.tags[(own + torch.from_numpy(steps).to(own)) % len(self.tags)]

    def _join(self, tags: Tensor, sentences: list[Tensor], longest: int) -> dict[str, Tensor]:
        """Return a batch of sources of at most *longest* tokens: each sentence (with end-of-sentence) after its tag."""
        rows = [torch.cat([tag.view(1), sentence.to(tag)]) for tag, sentence in zip(tags, sentences)]
        rows = [row if len(row) <= longest else torch.cat([row[: longest - 1], row[-1:]]) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=tags.device)
        tokens = data_utils.collate_tokens(rows, self.pad, self.eos, left_pad=self.task.cfg.left_pad_source)
        return {"src_tokens": tokens, "src_lengths": lengths}

    def _translate(self, model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Return the greedy translation of each source; the model is in evaluation mode afterwards."""
        if self.generator is None:
            self.generator = self.task.build_generator([model], GREEDY)
        model.eval()
        found = self.generator.generate([model], {"net_input": inputs})
        return [hypotheses[0]["tokens"].clone() for hypotheses in found]  # a search on a CPU is in inference mode


def unwrapped(model: Any) -> Any:
    """Return the model within fairseq's and torch's wrappers of data-parallel training."""
    while hasattr(model, "module"):
        model = model.module
    return model


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of two logging outputs, and the second one's loss and sample size as ``robt_``."""
    own = {f"robt_{name}": other[name] for name in ("loss", "sample_size")}
    return {**{name: value + other[name] for name, value in one.items()}, **own}
