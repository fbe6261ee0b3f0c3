"""Beam search with transformers, for a directory that ``export --format huggingface`` wrote."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.language_tags import TAG
from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError, one_line

from ..bundle import Bundle
from ..dictionary import SPECIAL, Dictionary
from ..text import packages_named
from ..verification import normalised, padded, shifted
from .directory import DirectoryEngine
from .torch_engine import Hypotheses

TARGET = "target"
"""Directory of the target tokenizer, if there are two dictionaries."""


def check_package() -> None:
    """Raise `UsageError` if transformers is missing."""
    with packages_named("'transformers>=5'"):
        import transformers  # noqa: F401


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and messages."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


class TokenizerDictionary:
    """A tokenizer of transformers in the form of a :class:`Dictionary`.

    Attributes:
        symbols: the special symbols and the target-language tags
    """

    pad, unk, eos = Dictionary.pad, Dictionary.unk, Dictionary.eos

    def __init__(self, tokenizer: Any):
        self.tokenizer, vocabulary = tokenizer, tokenizer.get_vocab()
        tags = sorted(filter(TAG.fullmatch, vocabulary))
        self.symbols = [*SPECIAL, *tags]
        marks = {tag: f">>{tag[2:-1]}<<" for tag in tags}  # the form of tags next to SentencePiece
        self.marks = {tag: mark for tag, mark in marks.items() if mark in vocabulary}

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, line: str) -> Tensor:
        """Return the ids of *line*, followed by end-of-sentence."""
        tag = next(filter(line.startswith, self.marks), "")
        line = self.marks.get(tag, "") + line.removeprefix(tag).removeprefix(" " * bool(tag))
        return torch.tensor(self.tokenizer(line, verbose=False).input_ids)

    def decode(self, indices: Sequence[int]) -> str:
        """Return the text of *indices*, with sub-words joined."""
        return self.tokenizer.decode([index for index in indices if index > self.eos])


class TransformersEngine(DirectoryEngine):
    """Engine for a model and tokenizers of transformers.

    Nothing is downloaded, and no code or pickle of the directory is used.

    Raises:
        UsageError: transformers is missing, or cannot load the directory
    """

    name = "transformers"

    def __init__(self, bundle: Bundle, options: SearchOptions, device: str = "cpu"):
        folder = bundle.checkpoint
        check_package()
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        own = os.path.join(folder, TARGET)
        try:
            with quiet():
                model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
                folders = (folder, own if os.path.isdir(own) else folder)
                tokenizers = [AutoTokenizer.from_pretrained(each, local_files_only=True) for each in folders]
        except Exception as error:  # corrupt files raise any exception
            raise UsageError(f"transformers cannot load {folder} ({one_line(error, 200)}); export it again") from error
        super().__init__(bundle, map(TokenizerDictionary, tokenizers), options, device)
        self.model = model.eval().to(device)

    def start(self, sentences: Sequence[Tensor], limit: int, nbest: int) -> Callable[[], Hypotheses]:
        """See :class:`DirectoryEngine`; the function itself searches."""
        return functools.partial(self._search, sentences, limit, nbest)

    @torch.inference_mode()
    def _search(self, sentences: Sequence[Tensor], limit: int, nbest: int) -> Hypotheses:
        options = self.options
        batch = torch.nn.utils.rnn.pad_sequence(sentences, True, Dictionary.pad).to(self.device)
        beams = {"length_penalty": float(options.lenpen), "early_stopping": True} if options.beam > 1 else {}
        output = self.model.generate(
            input_ids=batch, attention_mask=batch.ne(Dictionary.pad), num_beams=options.beam, do_sample=False,
            num_return_sequences=nbest, max_new_tokens=limit + 1, return_dict_in_generate=True, output_scores=True,
            **beams,
        )  # fmt: skip
        rows = [ended(row) for row in output.sequences]
        if options.beam > 1:
            scores = output.sequences_scores.tolist()
        else:
            steps = self.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
            scores = [float(step[: len(row)].sum()) / len(row) ** options.lenpen for row, step in zip(rows, steps)]
        found = [{"tokens": row, "score": torch.tensor(score)} for row, score in zip(rows, scores)]
        return [found[start : start + nbest] for start in range(0, len(found), nbest)]

    def log_probabilities(self, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the log-probabilities at all tokens of *targets*, tokens x V."""
        return log_probabilities(self.model, sentences, targets)


def log_probabilities(model: Any, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of transformers' *model* at all tokens of *targets*, tokens x V."""
    rows, inputs = padded(sentences), shifted(targets)
    whole = {"decoder_input_ids": inputs, "use_cache": False}  # with a cache, FSMT does not mask later positions
    logits = model(input_ids=rows, attention_mask=rows.ne(Dictionary.pad), **whole).logits
    return normalised(logits[inputs.ne(Dictionary.pad)])


def ended(row: Tensor) -> Tensor:
    """Return the generated tokens, from the second token to the end of the sentence."""
    ends = row[1:].eq(Dictionary.eos).nonzero()
    return row[1 : 2 + int(ends[0])] if len(ends) else row[1:]
