"""A trained model in CTranslate2's format, compared with the model that it was made of."""

from __future__ import annotations

import copy
import glob
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from ..bundle import Bundle, search_of
from ..dictionary import Dictionary
from ..loading import LoadedModel, ModelFacts
from ..plain import check_layers, check_weights, fold_all
from ..text import TextSteps
from . import ct2_format
from .ct2_engine import Ct2Engine
from .torch_engine import TorchEngine

SENTENCES, RANDOM, BATCH = 50, 16, 16
"""Sentences to check with, those of random units where there is no text, and those of a batch."""
SHARE = 0.98
"""Share of translations that must be equal; one may always differ, since rounding decides between near hypotheses."""
EXACT, ROUNDED = 1e-4, 0.5
"""Limits of the difference of log-probabilities: in float32 the greatest one, relative to the largest value if that is
above 1; in other types of weights the mean."""


class Disagreement(UsageError):
    """CTranslate2 computes something else."""


class Report(NamedTuple):
    """What the check has found.

    Attributes:
        sentences: number of sentences
        greatest, mean: difference of a token's log-probability
        equal: number of equal translations; None if none were compared
    """

    sentences: int
    greatest: float
    mean: float
    equal: int | None

    def __str__(self) -> str:
        scores = f"log-probabilities of {self.sentences} sentences within {self.greatest:.1e}"
        return scores if self.equal is None else f"{scores}, {self.equal} of {self.sentences} translations equal"


def make_plain(bundle: Bundle, loaded: LoadedModel) -> Transformer:
    """Return a copy of the model that CTranslate2 can compute.

    Raises:
        UsageError: it cannot compute this model
    """
    path, flags = bundle.checkpoint, loaded.stored.flags
    check_layers(path, flags, "ctranslate2")
    check_weights(path, loaded.model, "ctranslate2")
    problem = ct2_format.find_problem(loaded.model, flags, loaded.source, loaded.target)
    if problem:
        raise UsageError(f"{path} has {problem}")
    plain = copy.deepcopy(loaded.model)
    fold_all(path, plain, tables=True)
    return plain


def convert(bundle: Bundle, loaded: LoadedModel, plain: Transformer, folder: str, quantization: str) -> Report:
    """Fill the empty *folder* with the model, and compare it with *loaded*, whose model cannot be trained afterwards.

    Args:
        plain: what :func:`make_plain` returns
        quantization: type of the weights

    Raises:
        UsageError: the package is missing
        Disagreement: the results differ by more than rounding
        OSError: the folder cannot be written
    """
    ct2_format.check_package()
    spec = ct2_format.build_spec(plain, loaded.stored.flags.activation_fn, loaded.source, loaded.target)
    ct2_format.save_spec(spec, folder, quantization)
    del spec
    return _compare(bundle, loaded, folder, quantization)


def _compare(bundle: Bundle, loaded: LoadedModel, folder: str, quantization: str) -> Report:
    options = SearchOptions(**search_of(bundle))
    ours = TorchEngine([loaded], options)
    dictionaries, languages = (loaded.source, loaded.target), (loaded.source_lang, loaded.target_lang)
    facts = ModelFacts.of([loaded])
    theirs = Ct2Engine(folder, facts, dictionaries, languages, options, lambda: ours, torch.get_num_threads())
    sentences = _real(bundle, loaded, facts.max_source)
    real = bool(sentences)
    differences, scale, equal = [torch.zeros(0)], 1.0, 0
    for batch in _batches(sentences or _random(loaded.source, facts.max_source)):
        best = [found[0]["tokens"] for found in ours.translate_batch(batch)]
        expected, found = _log_probabilities(ours, batch, best), theirs.log_probabilities(batch, best)
        differences += [(a - b).abs() for a, b in zip(expected, found)]
        scale = max(scale, *(float(scores.abs().max()) for scores in expected))
        if real:
            others = next(theirs.translate([batch]))
            equal += sum(a.tolist() == b[0]["tokens"].tolist() for a, b in zip(best, others))
    difference = torch.cat(differences)
    report = Report(len(differences) - 1, float(difference.max()), float(difference.mean()), equal if real else None)
    _check(report, bundle.checkpoint, quantization, scale)
    return report


@torch.inference_mode()
def _log_probabilities(engine: TorchEngine, sentences: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Return those of the tokens of *targets*, of which none can be <pad>."""
    inputs = torch.full((len(targets), max(map(len, targets))), engine.target.pad)
    for row, tokens in zip(inputs, targets):
        row[: len(tokens)] = torch.cat([tokens[-1:], tokens[:-1]])
    logits = engine.models[0](engine.pad(sentences), None, inputs)[0].float()
    logits[..., engine.target.pad] = -torch.inf
    scores = logits.log_softmax(-1)
    return [row[: len(tokens)].gather(1, tokens.unsqueeze(1)).squeeze(1) for row, tokens in zip(scores, targets)]


def _check(report: Report, path: str, quantization: str, scale: float) -> None:
    exact = quantization == "float32"
    same = report.greatest <= EXACT * scale if exact else report.mean <= ROUNDED  # not so with NaN
    if not same:
        shown = f"by up to {report.greatest:.1e}" if exact else f"by {report.mean:.1e} on average"
        raise Disagreement(f"CTranslate2 computes other log-probabilities than {path} ({shown})")
    if exact and report.equal is not None:
        unequal = report.sentences - report.equal
        if unequal > max(1, (1 - SHARE) * report.sentences):
            shown = f"{unequal} of {report.sentences} sentences"
            raise Disagreement(f"CTranslate2 translates {shown} otherwise than {path}")


def _batches(sentences: list[Tensor]) -> Iterator[list[Tensor]]:
    for start in range(0, len(sentences), BATCH):
        yield sentences[start : start + BATCH]


def _real(bundle: Bundle, loaded: LoadedModel, longest: int) -> list[Tensor]:
    """Return sentences of the recipe's test set; none if the model is not in the folder of a recipe."""
    pattern = os.path.join(glob.escape(os.path.dirname(bundle.data)), "text/raw", f"test*.{loaded.source_lang}")
    paths = sorted(glob.glob(pattern))
    if not paths:
        return []
    text = TextSteps(loaded.source_lang, loaded.target_lang, bundle.codes, bundle.tokenizer, bundle.lowercase)
    sentences: list[Tensor] = []
    try:
        with open(paths[0], encoding="utf-8") as stream:
            for line in stream:
                tokens = loaded.source.encode(text.prepare(line.rstrip("\n")))
                if 1 < len(tokens) <= longest:
                    sentences.append(tokens)
                if len(sentences) == SENTENCES:
                    break
    except (OSError, UnicodeDecodeError):
        return []
    return sentences


def _random(source: Dictionary, longest: int) -> list[Tensor]:
    """Return sentences of random words, the same at each call."""
    draws = random.Random(1)
    words = range(Dictionary.unk + 1, len(source)) or [Dictionary.unk]
    lengths = [draws.randint(1, min(12, longest - 1)) for _ in range(RANDOM)]
    return [torch.tensor([*draws.choices(words, k=length), source.eos]) for length in lengths]
