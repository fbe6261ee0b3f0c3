"""Conversion of a trained model to CTranslate2's format, and comparison with the original model."""

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
from ..verification import RANDOM, Report, batches, token_rows
from . import ct2_format
from .ct2_engine import Ct2Engine
from .torch_engine import TorchEngine

SENTENCES, SHARE = 50, 0.98
"""Number of sentences for the check, and the share of translations that must be equal."""
EXACT, ROUNDED = 1e-4, 0.5
"""Limits of the difference of log-probabilities. In float32, the limit applies to the maximum difference, relative to
the largest value if that is above 1; for other types of weights, it applies to the mean."""


class Disagreement(UsageError):
    """CTranslate2's results differ from the model's."""


def make_plain(bundle: Bundle, loaded: LoadedModel) -> Transformer:
    """Return a copy of the model in a form that CTranslate2 supports.

    Raises:
        UsageError: CTranslate2 does not support this model
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
    """Write the model to the empty *folder* and compare it with *loaded*; afterwards, *loaded* cannot be trained.

    Args:
        plain: result of :func:`make_plain`
        quantization: type of the weights

    Raises:
        UsageError: CTranslate2 is not installed
        Disagreement: the results differ by more than rounding
        OSError: the directory cannot be written
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
    steps = bundle.text_steps(*languages, loaded.source)
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
    """Return the log-probabilities of the tokens of *targets*, with <pad> excluded."""
    inputs = torch.full((len(targets), max(map(len, targets))), engine.target.pad)
    for row, tokens in zip(inputs, targets):
        row[: len(tokens)] = torch.cat([tokens[-1:], tokens[:-1]])
    logits = engine.models[0](engine.pad(sentences), None, inputs)[0].float()
    logits[..., engine.target.pad] = -torch.inf
    scores = logits.log_softmax(-1)
    return [row[: len(tokens)].gather(1, tokens.unsqueeze(1)).squeeze(1) for row, tokens in zip(scores, targets)]


def _check(report: Report, path: str, quantization: str, scale: float, mean: float) -> None:
    exact = quantization == "float32"
    same = report.difference <= EXACT * scale if exact else mean <= ROUNDED  # false for NaN
    if not same:
        shown = f"by up to {report.difference:.1e}" if exact else f"by {mean:.1e} on average"
        raise Disagreement(f"CTranslate2's log-probabilities differ from {path} ({shown})")
    differing = report.differing(SHARE) if exact else ""
    if differing:
        raise Disagreement(f"CTranslate2's translations differ from {path} for {differing}")
