"""Trained models with their dictionaries, ready to translate."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from .bundle import Bundle
from .dictionary import Dictionary, check_hashes, hash_symbols
from .exported import reject_export
from .files import checksum
from .language_codes import short_code
from .model import StoredModel, build_model, read_stored
from .text import is_part


@dataclass(frozen=True)
class LoadedModel:
    """A trained model with its dictionaries.

    Attributes:
        model: the model with its weights, on the CPU
        stored: the stored model that it was built from
        source, target: dictionaries
        source_lang, target_lang: languages
    """

    model: Transformer
    stored: StoredModel
    source: Dictionary
    target: Dictionary
    source_lang: str
    target_lang: str


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model or an ensemble, without its weights.

    Attributes:
        arch: name of the architecture
        parameters: number of parameters
        layers: number of encoder and decoder layers; for an ensemble, of the first model
        max_source, max_target: maximum lengths of sources and hypotheses in tokens, with end-of-sentence
        pads_left: whether sources are padded on the left
    """

    arch: str | None
    parameters: int
    layers: tuple[int, int]
    max_source: int
    max_target: int
    pads_left: bool

    @classmethod
    def of(cls, loaded: Sequence[LoadedModel]) -> ModelFacts:
        """Return the properties of one model or of an ensemble."""
        first, models = loaded[0], [each.model for each in loaded]
        limits = [each.stored.task.get("max_source_positions") or math.inf for each in loaded]
        return cls(
            arch=getattr(first.stored.flags, "arch", None),
            parameters=sum(weights.numel() for model in models for weights in model.parameters()),
            layers=(len(models[0].encoder.layers), len(models[0].decoder.layers)),
            max_source=int(min(*limits, *(model.encoder.max_positions() for model in models))),
            max_target=min(model.decoder.max_positions() for model in models),
            pads_left=first.stored.task.get("left_pad_source") is not False,
        )


def read_model(bundle: Bundle) -> StoredModel:
    """Read the stored model of *bundle*.

    Raises:
        UsageError: the file cannot be read, or the model is an export for another program
    """
    reject_export(bundle.checkpoint)
    return read_stored(bundle.checkpoint)


def load_model(bundle: Bundle) -> LoadedModel:
    """Load the model of *bundle*.

    Raises:
        UsageError: a file cannot be read, the languages are unknown, the parts do not fit together, or the model is an
            export for another program
    """
    stored = read_model(bundle)
    languages = languages_of(bundle, stored.task)
    sides = [Dictionary.load(f"{bundle.data}/dict.{language}.txt") for language in languages]
    if bundle.codes is None and any(map(is_part, sides[0].symbols)):
        raise UsageError(f"{bundle.data} has sub-words, but no merges or SentencePiece model: give --bpe-codes")
    try:
        own = zip(("source", "target"), (hash_symbols(each.symbols) for each in sides))
        check_hashes(dict(own), stored.hashes, "give the directory of its own dictionaries (--data)")
        model = build_model(stored, *sides)
    except Exception as error:  # invalid settings raise arbitrary exceptions in torch
        problem = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UsageError(f"{bundle.checkpoint} does not fit {bundle.data}: {problem}") from error
    return LoadedModel(model, stored, *sides, *languages)


def check_ensemble(loaded: Sequence[LoadedModel], bundles: Sequence[Bundle]) -> None:
    """Raise `UsageError` if the models do not share languages, dictionaries, sub-words and text preparation."""
    steps = [(each.tokenizer, each.lowercase, each.codes and checksum(each.codes)) for each in bundles]
    for model, bundle, own in zip(loaded, bundles, steps):
        ways = [(short_code(each.source_lang), short_code(each.target_lang)) for each in (model, loaded[0])]
        if ways[0] != ways[1]:
            here, there = map(" to ".join, ways)
            problem = f"{bundle.checkpoint} translates {here}, but {bundles[0].checkpoint} {there}"
            raise UsageError(f"{problem}: use models of one direction in an ensemble")
        for side in ("source", "target"):
            if getattr(model, side) != getattr(loaded[0], side):
                path = f"{bundle.data}/dict.{getattr(model, f'{side}_lang')}.txt"
                problem = f"{path} differs from the dictionary of {bundles[0].checkpoint}"
                raise UsageError(f"{problem}: use models with equal dictionaries in an ensemble")
        names = ("tokenizer", "lowercase", "sub-words")
        if differs := [name for name, value, first in zip(names, own, steps[0]) if value != first]:
            problem = f"{bundle.checkpoint} and {bundles[0].checkpoint} prepare text differently ({', '.join(differs)})"
            raise UsageError(f"{problem}: use models with equal settings in an ensemble")


def languages_of(bundle: Bundle, task: dict[str, Any]) -> list[str]:
    """Return source and target language, from *bundle*, the settings *task*, or file names.

    Raises:
        UsageError: the languages are unknown, or the model translates in the other direction
    """
    sides = ("source_lang", "target_lang")
    given, stored = [getattr(bundle, side) for side in sides], [task.get(side) for side in sides]
    if None not in stored and any(map(eq, given, reversed(stored))) and stored[0] != stored[1]:
        asked = " to ".join(str(name or there) for name, there in zip(given, stored))
        raise UsageError(f"{bundle.checkpoint} translates {' to '.join(stored)}, not {asked}; omit -s and -t")
    pair = [name or there for name, there in zip(given, stored)]
    if not all(pair) and os.path.isdir(bundle.data):
        pair = _complete(pair, sorted(os.listdir(bundle.data)))
    if not all(pair):
        problem = f"{bundle.checkpoint} does not name its languages, and files in {bundle.data} do not"
        raise UsageError(f"{problem}: give --data DIR, the binarised data, or --source-lang and --target-lang")
    return [str(name) for name in pair]


def _complete(pair: list[str | None], files: list[str]) -> list[str | None]:
    """Complete *pair* with languages from the names of *files*: binarised data, otherwise dictionaries."""
    binarised = (re.match(r"[^.]+\.([^.-]+)-([^.-]+)\.", name) for name in files)
    inferred = next((list(match.groups()) for match in binarised if match and "None" not in match.groups()), [])
    if not any(pair):
        return inferred or pair
    names = inferred or [match[1] for match in (re.match(r"dict\.([^.]+)\.txt$", name) for name in files) if match]
    rest = [name for name in names if name not in pair]
    return [name or rest[0] for name in pair] if len(rest) == 1 else pair
