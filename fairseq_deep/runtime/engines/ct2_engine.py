"""Beam search with CTranslate2, on a CPU.

The output is CTranslate2's own. Its search differs from ours (``src/decoding.cc`` of CTranslate2) at the length limit,
for empty hypotheses, and if more hypotheses end in a step than are missing; docs/tools/export-ctranslate2.md has the
cases.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError, one_line

from ..bundle import Bundle
from ..dictionary import SPECIAL, Dictionary
from ..records import read_json, text
from ..text import packages_named
from .directory import DirectoryEngine
from .torch_engine import Hypotheses

OLDEST = (4, 7)
"""Oldest supported version of CTranslate2."""


def check_package() -> None:
    """Raise `UsageError` if CTranslate2's package is missing or too old."""
    with packages_named():
        import ctranslate2.specs
    found, oldest = ctranslate2.__version__, ".".join(map(str, OLDEST))
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise UsageError(f"ctranslate2 {found} is too old; pip install 'ctranslate2>={oldest}'")


class Ct2Engine(DirectoryEngine):
    """Engine for a directory in CTranslate2's format; see :class:`DirectoryEngine`.

    Args:
        bundle: the directory
        options: search options
        parallel: number of batches translated at once; they share torch's threads

    Raises:
        UsageError: CTranslate2 is missing, too old, or cannot load the model
    """

    name = "ctranslate2"

    def __init__(self, bundle: Bundle, options: SearchOptions, parallel: int = 1):
        folder = bundle.checkpoint
        super().__init__(bundle, [_read_vocabulary(folder, side) for side in ("source", "target")], options)
        threads = torch.get_num_threads()
        parallel = min(parallel, threads)
        self.translator = _open(folder, inter_threads=parallel, intra_threads=threads // parallel)

    def start(self, sentences: Sequence[Tensor], limit: int, nbest: int) -> Callable[[], Hypotheses]:
        """See :class:`DirectoryEngine`; CTranslate2's threads work in the background."""
        words = [[self.source.symbols[index] for index in tokens[:-1].tolist()] for tokens in sentences]
        pending = self.translator.translate_batch(
            words, beam_size=self.options.beam, num_hypotheses=nbest, length_penalty=self.options.lenpen,
            max_decoding_length=limit, max_input_length=0, return_scores=True, asynchronous=True,
        )  # fmt: skip
        return lambda: [self._hypotheses(result.result()) for result in pending]

    def _hypotheses(self, result: Any) -> list[dict[str, Tensor]]:
        found = []
        for words, score in zip(result.hypotheses, result.scores):
            tokens = torch.tensor([*(self.target.indices[word] for word in words), self.target.eos])
            found.append({"tokens": tokens, "score": torch.tensor(score)})
        return found

    def log_probabilities(self, sentences: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the log-probabilities of all tokens of *targets*, which end with end-of-sentence."""
        sides = ((self.source, sentences), (self.target, targets))
        words = [[[side.symbols[index] for index in row[:-1].tolist()] for row in rows] for side, rows in sides]
        results = self.translator.score_batch(*words, max_input_length=0)
        return torch.tensor([score for result in results for score in result.log_probs])


def _open(folder: str, **settings: int) -> Any:
    """Return the translator in *folder*; CTranslate2's warning about a conversion of types is suppressed."""
    check_package()
    import ctranslate2

    level = ctranslate2.get_log_level()
    ctranslate2.set_log_level(logging.ERROR)
    try:
        return ctranslate2.Translator(folder, **settings)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"CTranslate2 cannot load {folder} ({one_line(error, 200)}); export it again") from error
    finally:
        ctranslate2.set_log_level(level)


def _read_vocabulary(folder: str, side: str) -> Dictionary:
    """Return the vocabulary of one side.

    Raises:
        UsageError: it is missing, or not a vocabulary that ``export`` writes
    """
    paths = (os.path.join(folder, f"{name}_vocabulary.json") for name in (side, "shared"))
    path = next(filter(os.path.isfile, paths), None)
    if path is None:
        raise UsageError(f"{folder} has no vocabulary ({side}); export the model again")
    symbols = read_json(path, [text("(?s).*", "a token")], "export the model again")
    if symbols[:4] != [*SPECIAL]:
        raise UsageError(f"{path}: must be a list of tokens that begins with {', '.join(SPECIAL)}; export it again")
    return Dictionary(symbols[4:])
