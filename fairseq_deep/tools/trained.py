"""A trained model on its way to another format: its parts, its plain form, and the check of the written files."""

import argparse
import copy
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.runtime import find_bundle, load_model, search_of, verification
from fairseq_deep.runtime.loading import ModelFacts
from fairseq_deep.runtime.plain import Unsupported, check_layers, check_weights, fold_all
from fairseq_deep.tools.translate import find_parts


class Trained:
    """A model with its dictionaries and text steps.

    Args:
        path: the model
        args: options of `find_parts`, and "name", "licence", "output" of the command

    Attributes:
        path: path of the checkpoint
        search: settings of its experiment's beam search, with "gnmt_lenpen"

    Raises:
        UsageError: the model cannot be loaded
    """

    def __init__(self, path: str, args: argparse.Namespace):
        self.args, self.bundle = args, find_parts(path, args)
        self.path, self.loaded = self.bundle.checkpoint, load_model(self.bundle)
        self.languages = self.loaded.source_lang, self.loaded.target_lang
        self.steps = self.bundle.text_steps(*self.languages, self.loaded.source)
        self.search = {**search_of(self.bundle), "gnmt_lenpen": self.bundle.gnmt_lenpen}
        self.text = {"tokenizer": self.bundle.tokenizer, "lowercase": self.bundle.lowercase,
                     "sub_words": self.steps.kind}  # fmt: skip

    @cached_property
    def facts(self) -> ModelFacts:
        """Sizes and limits of the model."""
        return ModelFacts.of([self.loaded])

    def plain(self, format: str, tables: bool = False) -> tuple[Transformer, bool]:
        """Return a copy with plain connections, and whether weights of streams were folded.

        Args:
            tables: whether the format stores fixed positions

        Raises:
            Unsupported: *format*, a key of `NAMES`, does not support the model
        """
        check_layers(self.path, self.loaded.stored.flags, format)
        check_weights(self.path, self.loaded.model, format)
        for symbols in (self.loaded.source.symbols, self.loaded.target.symbols):
            twice = next((symbol for symbol, count in Counter(symbols).items() if count > 1), None)
            if twice is not None:
                raise Unsupported(f"{self.path} has a dictionary in which {twice[:40]} occurs twice")
        model = copy.deepcopy(self.loaded.model)
        return model, fold_all(self.path, model, tables)


class Format:
    """A model in another format: a subclass converts it, or rejects it, before anything is written.

    Attributes:
        program: the program that reads the format, for messages
        engine: the class of the engine for its directories
        made: the kind of output, for the message at the end
        limits: limits of the comparison with the model
        max_source, max_target: maximum lengths in tokens, with end-of-sentence
    """

    program: str
    engine: Any = None
    made: str
    limits: verification.Limits

    def __init__(self, trained: Trained):
        self.trained = trained
        self.max_source, self.max_target = trained.facts.max_source, trained.facts.max_target

    def write(self, place: str) -> None:
        """Write the file, or fill the empty directory, *place*."""
        raise NotImplementedError

    def open(self, place: str, options: SearchOptions) -> Any:
        """Return an engine for *place*, loaded like a user does."""
        return self.engine(find_bundle(place), options)

    def encode(self, engine: Any, texts: Sequence[str], rows: Sequence[Any]) -> Sequence[Any]:
        """Return the *rows* of tokens of *texts* in the indices of the format."""
        return rows

    def finish(self, place: str, found: str) -> None:
        """Add the parts that depend on *found*, the result of the check."""

    def check(self, place: str, count: int, given: Sequence[str] | None) -> str:
        """Compare *place* with the model, and describe the result.

        Args:
            count: number of sentences
            given: the name of a file with sentences and its lines; None: see `sentences`

        Raises:
            UsageError: the results differ by more than rounding
        """
        trained, search = self.trained, self.trained.search
        gnmt = search["gnmt_lenpen"] and self.limits.own_search
        origin, texts, rows = verification.sentences(
            trained.bundle, trained.loaded, trained.steps, count, self.max_source, given
        )
        longest = min(int(search["max_len_a"] * max(map(len, rows)) + search["max_len_b"]), self.max_target - 1)
        options = SearchOptions(**{**search, "gnmt_lenpen": gnmt, "max_len_a": 0, "max_len_b": longest})
        theirs, ours = self.open(place, options), verification.Reference(trained.loaded.model, options)
        real, own = origin != verification.RANDOM, self.encode(theirs, texts, rows)
        report = verification.compare(self.program, ours, theirs, rows, self.limits, real, own)
        return f"{report} ({origin}, beam {search['beam']}, lenpen {search['lenpen']:g})"
