"""A trained model in CTranslate2's format, compared with the model that it was made of."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError

from ..bundle import Bundle, search_of
from ..loading import LoadedModel, ModelFacts
from ..plain import check_layers, check_weights, fold_all
from ..text import TextSteps
from ..verification import RANDOM, Report, batches, token_rows
from . import ct2_format
from .ct2_engine import Ct2Engine
from .torch_engine import TorchEngine

SENTENCES, SHARE = 50, 0.98
"""Sentences to check with, and the share of translations that must be equal."""
EXACT, ROUNDED = 1e-4, 0.5
"""Limits of the difference of log-probabilities: in float32 the greatest one, relative to the largest value if that is
above 1; in other types of weights the mean."""


class Disagreement(UsageError):
    """CTranslate2 computes something else."""


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
    steps = TextSteps(*languages, bundle.codes, bundle.tokenizer, bundle.lowercase)
    origin, rows = token_rows(bundle, loaded, steps, SENTENCES, facts.max_source)
    differences, scale, equal = [torch.zeros(0)], 1.0, None if origin == RANDOM else 0
    for batch in batches([torch.tensor(row) for row in rows]):
        best = [found[0]["tokens"] for found in ours.translate_batch(batch)]
        expected, found = _log_probabilities(ours, batch, best), theirs.log_probabilities(batch, best)
        differences += [(a - b).abs() for a, b in zip(expected, found)]
        scale = max(scale, *(float(scores.abs().max()) for scores in expected))
        if equal is not None:
            others = next(theirs.translate([batch]))
            equal += sum(a.tolist() == b[0]["tokens"].tolist() for a, b in zip(best, others))
    difference = torch.cat(differences)
    report = Report("log-probabilities", len(rows), float(difference.max()), equal)
    _check(report, bundle.checkpoint, quantization, scale, float(difference.mean()))
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


def _check(report: Report, path: str, quantization: str, scale: float, mean: float) -> None:
    exact = quantization == "float32"
    same = report.difference <= EXACT * scale if exact else mean <= ROUNDED  # not so with NaN
    if not same:
        shown = f"by up to {report.difference:.1e}" if exact else f"by {mean:.1e} on average"
        raise Disagreement(f"CTranslate2 computes other log-probabilities than {path} ({shown})")
    differing = report.differing(SHARE) if exact else ""
    if differing:
        raise Disagreement(f"CTranslate2 translates {differing} otherwise than {path}")
